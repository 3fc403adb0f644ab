"""How much of an evicted request's KV to keep, as "Semantic Scheduling for LLM Inference" has it.

For the record: nothing of ours goes by it. There, tokens that were decoded are computed again by
decode steps, one each. An engine computes them in one prefill, which takes the less for a token the
more there are of them, so that to keep all or nothing is best
(tests/sage_sched/steps/test_time.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodedAgain:
    """The paper's costs, in seconds: load_s (its beta) for a token that was kept; of a step after n
    tokens kv_token_s * n + step_s (its gamma 1 and gamma 2)."""

    load_s: float
    kv_token_s: float
    step_s: float

    def resume_s(self, input_tokens: int, decoded_tokens: int, kept_tokens: float) -> float:
        """Its Eq. 5: to load kept_tokens of those that were decoded, and compute the others."""
        again = decoded_tokens - kept_tokens
        kv_token_steps = again * again / 2 + input_tokens * again + again / 2
        return self.load_s * kept_tokens + self.kv_token_s * kv_token_steps + self.step_s * again

    def kept_tokens(self, input_tokens: int, decoded_tokens: int) -> float:
        """The least of Eq. 5, in its Eq. 6's place: that leaves out decoded_tokens, as if what is
        left to compute were what is kept, and halves the result."""
        again = (self.load_s - self.step_s) / self.kv_token_s - input_tokens - 0.5
        return min(max(decoded_tokens - again, 0.0), float(decoded_tokens))

    def kept_as_printed(self, input_tokens: int) -> float:
        """Its Eq. 6."""
        rest_s = self.load_s - self.kv_token_s * input_tokens
        return max(0.0, (rest_s - (self.kv_token_s + 2 * self.step_s) / 2) / (2 * self.kv_token_s))
