"""Describes a request as the simulator knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.simulator.radix_tree import Span, TreeNode
from sage_sched.distribution import LengthDistribution
from sage_sched.job import NO_HINTS, BatchPart, Hints, Job
from sage_sched.slo import Deadlines

# A gap between two tokens counts as a pause from this on; prefills delay tokens by less.
PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request before it is served.

    output_tokens: the true length, 1 to max_new_tokens.
    distribution: the predicted length, or None.
    class_name: for reports.
    spans: its prompt as slices of token sequences that prompts share (radix_tree.Span); () if it
        shares none.
    prompt: its text, for real servers; "" if only its length is known.
    follows: the index of an earlier request. This one comes pause_s after that one's answer, and
        its arrival_s counts for nothing until then. None if it comes at arrival_s.
    hints: the client's.
    adapter: its LoRA adapter; "" for the model itself.
    is_pinned, batch: see Job.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    max_new_tokens: int
    distribution: LengthDistribution | None
    class_name: str
    spans: tuple[Span, ...] = ()
    follows: int | None = None
    pause_s: float = 0.0
    hints: Hints = NO_HINTS
    adapter: str = ""
    is_pinned: bool = False
    prompt: str = ""
    batch: BatchPart | None = None


@dataclass(slots=True, eq=False)
class Progress:
    """A request in the engine. A policy sees only its Job.

    index: its place in the run's requests.
    age_offset, served_offset: constant while it decodes. With the batch's step counter they add up
        to its generated tokens and its served tokens.
    prefilled_tokens: the prefilled part of the chunked request.
    node, tree_tokens: used while on the device: the radix tree's node where the known part of its
        sequence ends, and the length of that part.
    swapped: whether its KV is in host memory.
    token_s: when its newest token came.
    longest_gap_s: between two of its tokens.
    pauses_s: when gaps of PAUSE_S or more began and ended.
    deadlines: the deadlines of its tokens, or None.
    num_next_on_time: tokens after the first that were on time.
    """

    request: SimRequest
    index: int
    job: Job
    age_offset: int = 0
    served_offset: int = 0
    finish_step: int = -1
    prefilled_tokens: int = 0
    node: TreeNode | None = None
    tree_tokens: int = 0
    swapped: bool = False
    token_s: float = 0.0
    longest_gap_s: float = 0.0
    first_token_s: float = -1.0
    last_token_s: float = -1.0
    num_retractions: int = 0
    pauses_s: list[tuple[float, float]] = field(default_factory=list)
    deadlines: Deadlines | None = None
    num_next_on_time: int = 0

    @property
    def generated_tokens(self) -> int:
        """Its age in tokens."""
        return self.job.generated_tokens

    @property
    def fill_tokens(self) -> int:
        """The tokens of a prefill without a cache."""
        return self.request.input_tokens + self.generated_tokens

    def sequence(self) -> Sequence[Span]:
        """Return its prompt and its answer so far."""
        own = -1 - self.index
        if not self.request.spans:
            return ((own, 0, self.fill_tokens),)
        return (*self.request.spans, (own, 0, self.generated_tokens))

    @property
    def kv_tokens(self) -> int:
        """The KV that it holds or held while decoding: the newest token has none yet."""
        return self.request.input_tokens + self.generated_tokens - 1
