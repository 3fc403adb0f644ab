"""By how much a server's steps take longer now than their model says (ProServe, section 4.1)."""

from __future__ import annotations

# The share that stays at each correction, and of how many steps one is.
THETA = 0.9
_STEPS = 8


class Pace:
    """factor: of the model's seconds, beta. It follows the mean of real over predicted seconds, a
    window of steps at a time: `beta <- theta beta + (1 - theta) mean`. What is predicted is the
    model's own figure, so that beta is what it is off by, and not a product of corrections."""

    def __init__(self, theta: float = THETA) -> None:
        self._theta = theta
        self.reset()

    def reset(self) -> None:
        """Nothing has been seen: the model is new."""
        self.factor = 1.0
        self._sum, self._num_steps = 0.0, 0

    def add(self, real_s: float, predicted_s: float) -> None:
        """A step is over. What cannot be a step of this model does not count."""
        if not (real_s > 0 and predicted_s > 0):
            return
        # One step that something else held up says nothing of the next.
        self._sum += min(real_s / predicted_s, 4 * self.factor)
        self._num_steps += 1
        if self._num_steps == _STEPS:
            mean = self._sum / self._num_steps
            self.factor = self._theta * self.factor + (1 - self._theta) * mean
            self._sum, self._num_steps = 0.0, 0
