"""Uses a probe of hidden states to predict the rest of an answer."""

from sage_sched.probe.refining import Edges, Refiner, from_steps, in_steps

__all__ = ["Edges", "Refiner", "from_steps", "in_steps"]
