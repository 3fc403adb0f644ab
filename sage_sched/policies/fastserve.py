"""FastServe: a skip-join multi-level feedback queue, without prediction."""

from __future__ import annotations

import math

from sage_sched.job import Job
from sage_sched.policy import Policy, register


@register("fastserve")
class FastServePolicy(Policy):
    """Skip-join MLFQ (Wu et al. 2023, section 4.1).

    A request joins the level whose quantum covers its first iteration, the prefill, and is demoted
    a level each time that it has used up its level's quantum; quanta double. In a level by
    arrival. A running request yields to any of a better level. Time is this server's step time at
    full slots, so that a token has a price that is the same on every rank.
    """

    def admit(self, job: Job) -> bool:
        step = self.server.step_time
        prefill_s = step.prefill_s(1, job.input_tokens, job.input_tokens**2 / 2)
        quanta = prefill_s * 1e3 / self.config.mlfq_quantum_ms
        job.memo = max(0, math.ceil(math.log2(quanta))) if quanta > 0 else 0
        return True

    def key(self, job: Job, served_tokens: int) -> float:
        assert isinstance(job.memo, int)
        slots, pool = self.server.max_running_requests, self.server.kv_pool_tokens
        decoded_s = job.generated_tokens * self.server.step_time.decode_s(slots, pool)
        return float(self._level(decoded_s, job.memo))

    def _level(self, used_s: float, joined: int) -> int:
        """The level after used_s seconds for a job that joined at a level: the quanta of levels
        joined to n - 1 add up to (2^n - 2^joined) quanta of level 0."""
        quanta = used_s * 1e3 / self.config.mlfq_quantum_ms
        return math.floor(math.log2(2.0**joined + quanta) + 1e-9)

    def yields(self, running: Job, waiting: Job, served_tokens: int, move_s: float) -> bool:
        return self.key(waiting, served_tokens) < self.key(running, served_tokens)
