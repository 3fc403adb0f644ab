"""Describes a request, as a policy sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sage_sched.distribution import LengthDistribution, Refined

DEFAULT_URGENCY = 3
# The ranges of weights, and of deadlines and pauses (ms). Within them, derived numbers stay finite
# and precise.
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
LEAST_SLO_MS, MOST_SLO_MS = 1e-3, 1e9
MAX_NAME_CHARACTERS = 256
# Levels of priorities are at most this far from 0, so that a float holds them exactly.
MOST_LEVEL = 1 << 50
# A job of a batch is behind the jobs of all levels while its level is raised by this.
BEHIND = 1 << 52
_RANGES = {
    **dict.fromkeys(("weight", "first_token_weight"), (LEAST_WEIGHT, MOST_WEIGHT)),
    **dict.fromkeys(
        ("ttft_slo_ms", "tpot_slo_ms", "pause_ms", "max_wait_ms"), (LEAST_SLO_MS, MOST_SLO_MS)
    ),
}


@dataclass(frozen=True, slots=True)
class Hints:
    """The importance of a request, according to the operator or a trusted client.

    weight: how much it counts, 0.001 to 1000.
    ttft_slo_ms, tpot_slo_ms: targets for its first token and for each further one, 0.001 to 1e9;
        None: no target.
    urgency: 1 (most urgent) to 5.
    session: the conversation or program that it belongs to; "" if unknown.
    pause_ms: how long after its answer the session's next request is expected; None if unknown.
    ends_session: whether it is the session's last request.
    tenant: the user or customer that it belongs to, if tenants share fairly; "" if unknown.
    Clients do not set these (see sage_sched.slo.classes):
    slo_class: its class; "" if none.
    first_token_weight: how many further tokens its first one counts for, 0.001 to 1000.
    shares_fairly: whether the tenants of its class take turns (sage_sched.fair_shares).
    max_wait_ms: how long it may wait until it first runs; None for no limit.
    """

    weight: float = 1.0
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    urgency: int = DEFAULT_URGENCY
    session: str = ""
    pause_ms: float | None = None
    ends_session: bool = False
    tenant: str = ""
    slo_class: str = ""
    first_token_weight: float = 1.0
    shares_fairly: bool = False
    max_wait_ms: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError unless the fields are as the class documents them."""
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            # Written so that NaN fails too. A client may have sent anything.
            if value is None and name.endswith("_ms"):
                continue
            if type(value) not in (int, float) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r:.40}, allowed: {least:g} to {most:g}")
        if type(self.urgency) is not int or not 1 <= self.urgency <= 5:
            raise ValueError(f"urgency is {self.urgency!r:.40}, allowed: 1 to 5")
        for name, text in (("session", self.session), ("tenant", self.tenant)):
            if type(text) is not str or len(text) > MAX_NAME_CHARACTERS:
                allowed = f"a string of at most {MAX_NAME_CHARACTERS} characters"
                raise ValueError(f"{name} is {text!r:.40}, allowed: {allowed}")
        if type(self.ends_session) is not bool:
            raise ValueError(f"ends_session is {self.ends_session!r:.40}, allowed: true or false")
        if type(self.slo_class) is not str or type(self.shares_fairly) is not bool:
            raise ValueError(f"no class is named {self.slo_class!r:.40}, or can share so")

    @property
    def next_in_s(self) -> float | None:
        """Return the expected seconds from its answer to the session's next request; inf for
        never."""
        if self.ends_session:
            return math.inf
        return None if self.pause_ms is None else self.pause_ms / 1000

    @property
    def has_slo(self) -> bool:
        """Whether it has a deadline for any of its tokens."""
        return self.ttft_slo_ms is not None or self.tpot_slo_ms is not None


NO_HINTS = Hints()
# The hints that a trusted client may give.
CLIENTS_HINTS = (
    "weight", "ttft_slo_ms", "tpot_slo_ms", "urgency", "session", "pause_ms", "ends_session",
    "tenant",
)  # fmt: skip


# A level, a class and one of its tenants.
Group = tuple[float, str, str]


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The batch that a request is a part of (sage_sched.batches).

    name: its id. num_requests: how many requests it has. done_in_s: the seconds from the request's
    arrival until all of it has to be done. num_servers: how many data-parallel servers share it.
    """

    name: str
    num_requests: int
    done_in_s: float
    num_servers: int = 1


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """One request, as a policy sees it. The engine keeps its age and its tokens current.

    arrival: how many requests came before it.
    input_tokens: length of its prompt.
    max_new_tokens: the cap on its answer, at least 1.
    distribution: the distribution of its answer's length, predicted from its prompt.
    served_at_arrival_tokens: the server's work until its arrival, prefill and decode.
    arrival_s: when it came, on the clock of SchedulerView.now_s; known from its first pass on.
    has_fixed_length: whether it goes on to its cap (SGLang's ignore_eos).
    keeps_memory: whether its KV outlives its answer (a streaming session's).
    level: its priority, if the server's operator lets clients set one; smaller levels go before all
        others (sage_sched.waiting_queue).
    is_pinned: whether its answer would change if it lost its KV, and its KV cannot be swapped. So
        memory for the rest of its answer is reserved when it is admitted, as SGLang's `fcfs` does,
        and it is not preempted.
    adapter: its LoRA adapter; "" for the model itself.
    batch: the batch that it is a part of, or None.
    is_due: whether it goes first, so that its batch is done in time.
    is_held: whether it is held back (Policy.key), because others of its batch start before it.
    generated_tokens: its age, the length of its answer so far. Only grow() sets it.
    prefilled_tokens: how much of its prompt is prefilled, while it is being chunked.
    cached_tokens: how much of its sequence the radix tree had at the last look-up; for a running
        job, when it entered. was_looked_up: whether there was a look-up. recall_tokens: the time to
        load the cached KV that was only in host memory, as the number of tokens that could be
        prefilled in that time.
    shared_tokens: the part of its cached prompt that other jobs held when it arrived.
    held_tokens: while it runs, the KV that its end will free; 0 if a page has one token.
    served_tokens: the server's work for it so far, prefill and decode, recomputed tokens included.
        The sum over all jobs is SchedulerView.served_tokens.
    num_preemptions: how often it was preempted for other jobs.
    goes_first: whether no other job may overtake it: permanently, because it has passed the
        starvation bound or its policy could not rank it, or temporarily, because it has passed the
        swap-out bound or its batch needs it.
    starts_now: whether its policy says that its start is due. It may then be admitted to a full
        batch without preempting another job.
    refined: the prediction of its length, refined by its answer so far; None until it is refined.
    revision: how often it was refined.
    ranked_at: the revision of its queue when it was ranked (sage_sched.waiting_queue).
    ttft_s: the deadline of its first token, from its arrival; inf: none.
    watch: its waiting queue's set of changed jobs. It adds itself when its place may have changed.
    column_watch: the same for sage_sched.overload.
    index_state, evidence, memo: private to sage_sched.index, to the sage_sched.probe.Refiner and to
        the policy.
    """

    arrival: int
    input_tokens: int
    max_new_tokens: int
    distribution: LengthDistribution
    served_at_arrival_tokens: int
    arrival_s: float = 0.0
    hints: Hints = NO_HINTS
    has_fixed_length: bool = False
    keeps_memory: bool = False
    is_pinned: bool = False
    adapter: str = ""
    level: int = 0
    batch: BatchPart | None = None
    is_due: bool = False
    is_held: bool = False
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    was_looked_up: bool = False
    recall_tokens: int = 0
    shared_tokens: int = 0
    held_tokens: int = 0
    ttft_s: float = math.inf
    served_tokens: int = 0
    num_preemptions: int = 0
    passed_starvation_bound: bool = False
    passed_swap_out_bound: bool = False
    goes_first: bool = False
    starts_now: bool = False
    refined: Refined | None = None
    revision: int = 0
    ranked_at: int = 0
    watch: dict[Job, None] | None = field(default=None, repr=False)
    column_watch: dict[Job, None] | None = field(default=None, repr=False)
    index_state: object = field(default=None, repr=False)
    evidence: object = field(default=None, repr=False)
    memo: object = field(default=None, repr=False)

    def changes(self) -> None:
        """Note that its place may have changed."""
        if self.watch is not None:
            self.watch[self] = None
        if self.column_watch is not None:
            self.column_watch[self] = None

    def grow(self, generated_tokens: int) -> None:
        if generated_tokens != self.generated_tokens:
            self.generated_tokens = generated_tokens
            self.changes()

    def prefill(self, num_tokens: int) -> None:
        """Set how much of its prompt is prefilled."""
        if num_tokens != self.prefilled_tokens:
            self.prefilled_tokens = num_tokens
            self.changes()

    @property
    def is_predicted(self) -> bool:
        """Whether anything is known of its answer's length."""
        return self.distribution.source != "none"

    @property
    def group(self) -> Group | None:
        """Return the group whose jobs keep their order, or None if its class does not share
        fairly."""
        hints = self.hints
        return (self.level, hints.slo_class, hints.tenant) if hints.shares_fairly else None

    @property
    def cached_input_tokens(self) -> int:
        """Return the cached tokens of its prompt, less the cost of loading them to the device. If
        the job was retracted, cached_tokens may include its answer."""
        return min(self.cached_tokens, self.input_tokens) - self.recall_tokens

    def mean_tokens(self) -> float:
        """Return the mean length of its answer, predicted from its prompt."""
        return self.distribution.capped(self.max_new_tokens).mean()

    def revise(self, refined: Refined | None) -> None:
        """Set its refined length; None to forget it. The caller then reports the change
        (Scheduler.refined)."""
        self.refined = refined
        self.revision += 1
        self.changes()

    def forget_policy(self) -> None:
        """Reset all policy-specific state, because another policy takes over. Its age, its tokens
        and its bounds stay."""
        self.starts_now = False
        self.refined = None
        self.revision = self.ranked_at = 0
        self.watch = self.column_watch = None
        self.index_state = self.evidence = self.memo = None

    def put(self, level: int, is_due: bool, is_held: bool) -> None:
        """Set its level, whether its batch needs it now, and whether it waits for others of it."""
        if (level, is_due, is_held) != (self.level, self.is_due, self.is_held):
            self.level, self.is_due, self.is_held = level, is_due, is_held
            has_passed = self.passed_starvation_bound or self.passed_swap_out_bound
            self.goes_first = has_passed or is_due
            self.changes()

    def pass_starvation_bound(self) -> None:
        self.passed_starvation_bound = self.goes_first = True
        self.changes()

    def pass_swap_out_bound(self, has_passed: bool) -> None:
        """Set whether it has passed the swap-out bound, and so goes first."""
        self.passed_swap_out_bound = has_passed
        self.goes_first = has_passed or self.passed_starvation_bound or self.is_due
        self.changes()


# Level, key and arrival: jobs are served by their places.
Place = tuple[float, float, int]
Entry = tuple[float, float, int, Job]
