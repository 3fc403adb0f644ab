"""What a probe of hidden states says of the rest of an answer, and who uses it."""

from sage_sched.probe.refining import Edges, Refiner, Refining, from_steps, in_steps, refiner_of

__all__ = ["Edges", "Refiner", "Refining", "from_steps", "in_steps", "refiner_of"]
