"""One scheduling pass: who gets in. After SGLang's _get_new_batch_prefill_raw and PrefillAdder.

Under our policies what requests will still need is foreseen (sage_sched/outlook.py); SGLang sets
aside a share of the cap that is the same for all.

With preemption, a full batch takes in those alone to whom others yield. SGLang's own preemption
drops batch_is_full instead and so lets requests trickle in, a prefill step each, while all others
wait: that costs more than preempting gains (srpt-oracle, H800 preset at 8 requests/s: mean TTLT
10 % above no preemption, against 1 % below this way).
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from bench.simulator.batch import Part, PassResult
from bench.simulator.request import Progress
from bench.simulator.state import EngineState
from bench.simulator.stock import StockPolicy
from sage_sched.job import Job
from sage_sched.outlook import set_aside_tokens
from sage_sched.plan import PLAN_WINDOW, Claimant, Departure, plan_turns


class Pass:
    """The budgets of one pass, SGLang's rem_total_tokens, rem_input_tokens, rem_chunk_tokens."""

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.result = PassResult()
        engine = state.engine
        self._page = engine.page_size
        self._set_aside = self._set_aside_tokens()
        self._room = state.pool.room_tokens - sum(self._set_aside.values())
        self._input_left = engine.max_prefill_tokens
        self._chunk_left = engine.chunked_prefill_size
        self._slots = engine.max_running_requests - len(state.decode)
        # Our hooks leave a pass in which a prompt is being chunked to SGLang, and it sees no
        # swapped request (patches/turns.py).
        self._takes_turns = state.preempts and state.chunked is None
        self._turns: dict[Job, tuple[Job, ...]] | None = None

    def run(self) -> PassResult:
        """Admit what fits, in order, up to the first that does not."""
        state = self.state
        state.queue.arrange(state.served_tokens)
        if state.chunked is not None:
            self._continue_chunk(state.chunked)
        admitted = []
        for position, candidate in enumerate(state.queue):
            if candidate.swapped and not self._takes_turns:
                continue
            if self._room > 0 and self._is_spent():
                break
            fits = not state.batch_is_full and self._fits(candidate, 0, 0)
            if not fits and not self._make_room(position):
                state.batch_is_full |= self._holds_any()
                break
            if not self._admit(candidate):
                break
            admitted.append(position)
            if self._room <= 0:
                state.batch_is_full = True
                break
        state.queue.drop(admitted)
        return self.result

    def _is_spent(self) -> bool:
        """Whether the pass's compute budget is."""
        return self._input_left <= 0 or self._chunk_left <= 0

    def _holds_any(self) -> bool:
        """Whether a request that may leave runs, or is about to."""
        return bool(self.result.parts or self.result.resumed or len(self.state.decode))

    def _set_aside_tokens(self) -> dict[Progress, float]:
        """For the rest of the running requests' answers."""
        state = self.state
        for progress in state.decode:
            state.decode.sync(progress)
        left = np.array([self._to_come(p) for p in state.decode])
        if state.outlook is None:
            return dict(zip(state.decode, left.tolist(), strict=True))
        held = np.array([p.kv_tokens for p in state.decode])
        shares = set_aside_tokens(held, left, self._page).tolist()
        return dict(zip(state.decode, shares, strict=True))

    def _to_come(self, progress: Progress) -> float:
        """Of a running request's answer: as foreseen, or SGLang's share of what its cap leaves."""
        left = self._foreseen_tokens(progress)
        if left is not None:
            return float(self._clipped(left))
        cap_leaves = progress.request.max_new_tokens - progress.generated_tokens
        return self._clipped(cap_leaves) * self.state.ratio.value

    def _foreseen_tokens(self, progress: Progress) -> int | None:
        """Of its answer, to come; None where nothing is known of it."""
        if self.state.outlook is None:
            return None
        progress.job.generated_tokens = progress.generated_tokens
        return self.state.outlook.left_tokens(progress.job)

    def _expected_tokens(self, progress: Progress) -> int:
        """Of its answer, from its first token, as far as admission can tell."""
        left = self._foreseen_tokens(progress)
        if left is None:
            return progress.request.max_new_tokens
        return progress.generated_tokens + left

    def _clipped(self, num_tokens: int) -> int:
        return min(num_tokens, self.state.engine.clip_max_new_tokens)

    def _left_tokens(self, progress: Progress) -> int:
        """Of its answer, to come."""
        return self._clipped(self._expected_tokens(progress) - progress.generated_tokens)

    def _demand(self, progress: Progress) -> int:
        """What admission asks for; the tokens that the tree has must be held as well."""
        return progress.fill_tokens + self._left_tokens(progress) + self._page

    def _fits(self, progress: Progress, more_slots: int, more_tokens: int) -> bool:
        room = self._room + more_tokens
        return self._slots + more_slots > 0 and self._demand(progress) < room

    def _charge(self, num_tokens: int, answer_tokens: int) -> int:
        """Take from the room; the tokens in full pages."""
        paged = -(-num_tokens // self._page) * self._page
        self._room -= paged + self._page + answer_tokens
        return paged

    def _continue_chunk(self, progress: Progress) -> None:
        state = self.state
        left = progress.fill_tokens - progress.prefilled_tokens
        budget = min(self._chunk_left, int(self._room))
        if budget <= 0:
            budget = self._chunk_left  # it must go on, or its KV is never given back
        if isinstance(state.policy, StockPolicy):
            works = (p.fill_tokens - p.tree_tokens for p in state.queue)
            limit = state.policy.chunk_limit(left, self._chunk_left, self._page, works)
            budget = budget if limit is None else min(budget, limit)
        self._slots -= 1
        # SGLang's for our policies too: no hook of ours is at add_chunked_req.
        answer_tokens = self._clipped(progress.request.max_new_tokens)
        self._prefill(progress, progress.prefilled_tokens, min(left, budget), answer_tokens)

    def _admit(self, progress: Progress) -> bool:
        """Take a request that fits; False where the pass's compute budget does not allow it."""
        state = self.state
        if progress.swapped:
            self._charge(progress.kv_tokens, self._left_tokens(progress))
            self._slots -= 1
            state.hold(state.pool.pages(progress.kv_tokens))
            progress.swapped = False
            self.result.resumed.append(progress)
            self.result.moved_tokens += progress.kv_tokens
            return True
        cached = progress.tree_tokens
        new = progress.fill_tokens - cached
        if -(-new // self._page) * self._page > self._chunk_left:
            new = self._chunk_left // self._page * self._page
            if new <= 0 or state.chunked is not None:
                return False
        self._slots -= 1
        self._room -= cached
        state.pool.hold_cached(progress)
        # SGLang's _update_prefill_budget counts what is generated already once more.
        answer_tokens = self._clipped(self._expected_tokens(progress))
        self._prefill(progress, cached, new, answer_tokens)
        return True

    def _prefill(
        self, progress: Progress, done_tokens: int, new_tokens: int, answer_tokens: int
    ) -> None:
        """answer_tokens: to reserve where this is the last of its prompt."""
        state, pages = self.state, self.state.pool.pages
        completes = done_tokens + new_tokens == progress.fill_tokens
        paged = self._charge(new_tokens, answer_tokens if completes else 0)
        self._input_left -= paged
        self._chunk_left -= paged
        state.hold(pages(done_tokens + new_tokens) - pages(done_tokens))
        if not completes:
            state.chunked = progress
        elif state.chunked is progress:
            state.chunked = None
        self.result.parts.append(Part(progress, done_tokens, new_tokens, completes))

    def _make_room(self, position: int) -> bool:
        """Have running requests yield to the waiting one at this position, if the plan says so."""
        if not self._takes_turns or not self.state.queue[position].ranked:
            return False
        if self._turns is None:
            self._turns = self._plan(position)
        candidate = self.state.queue[position]
        yielding = self._turns.get(candidate.job, ())
        victims = [p for p in self.state.decode if p.job in yielding]
        freed = sum(self._freed_tokens(p) for p in victims)
        if not victims or not self._fits(candidate, len(victims), freed):
            return False
        for progress in victims:
            self._swap_out(progress)
        return True

    def _plan(self, position: int) -> dict[Job, tuple[Job, ...]]:
        state = self.state
        running = {}
        for progress in state.decode:
            progress.job.generated_tokens = progress.generated_tokens
            if progress.ranked:
                running[progress.job] = progress
        waiting = []
        for progress in islice(state.queue, position, position + PLAN_WINDOW):
            if not progress.ranked:
                break
            waiting.append(Claimant(progress.job, self._demand(progress)))

        def departure(job: Job) -> Departure:
            progress = running[job]
            price_s = state.policy.server.swap_s(progress.kv_tokens)
            return Departure(price_s, self._freed_tokens(progress))

        turns = plan_turns(
            running,
            waiting,
            free_slots=self._slots,
            free_tokens=int(self._room),
            policy=state.policy,
            served_tokens=state.served_tokens,
            max_yields=state.max_yields,
            departure=departure,
        )
        return {turn.newcomer: turn.yielding for turn in turns}

    def _freed_tokens(self, progress: Progress) -> int:
        """What a member of the batch would give back."""
        held = self.state.pool.pages(progress.kv_tokens) * self._page
        return held + int(self._set_aside[progress])

    def _swap_out(self, progress: Progress) -> None:
        state = self.state
        self._slots += 1
        self._room += self._freed_tokens(progress)
        state.decode.leave(progress)
        state.pool.release(state.pool.pages(progress.kv_tokens), 0, None)
        progress.tree_tokens = 0
        progress.swapped = True
        progress.job.num_yields += 1
        self.result.yielded.append(progress)
        self.result.moved_tokens += progress.kv_tokens


def scheduling_pass(state: EngineState) -> PassResult:
    """What SGLang does before every step."""
    if not len(state.decode):
        state.batch_is_full = False
    if state.chunked is None:
        if not len(state.queue) or (state.batch_is_full and not state.preempts):
            return PassResult()
        if len(state.decode) >= state.engine.max_running_requests and not state.preempts:
            state.batch_is_full = True
            return PassResult()
    return Pass(state).run()
