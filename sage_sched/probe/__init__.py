"""What a probe of hidden states says of the rest of an answer, and whether it is believed."""

from sage_sched.probe.posterior import DUE_INTERVAL_TOKENS, Posterior, Reading, is_due
from sage_sched.probe.refining import (
    NUM_ANSWERS_JUDGED,
    Refiner,
    Refining,
    from_steps,
    in_steps,
    refiner_of,
)

__all__ = [
    "DUE_INTERVAL_TOKENS", "NUM_ANSWERS_JUDGED", "Posterior", "Reading", "Refiner", "Refining",
    "from_steps", "in_steps", "is_due", "refiner_of",
]  # fmt: skip
