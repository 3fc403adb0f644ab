"""What a policy may see of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from sage_sched.distribution import LengthDistribution


@dataclass(slots=True, eq=False)
class Job:
    """One request, as a policy sees it. Whoever owns the engine keeps generated_tokens current.

    arrival: how many requests came before it.
    input_tokens: length of its prompt.
    max_new_tokens: the cap on its answer, at least 1.
    distribution: of its answer's length; None where nothing is known.
    served_at_arrival_tokens: what the server had worked off by then (prefill and decode).
    generated_tokens: its age.
    num_yields: how often it has made room for another.
    forecast: what sage_sched.outlook computed of it; no one else reads it.
    memo: what the policy computed at its arrival; no one else reads it.
    """

    arrival: int
    input_tokens: int
    max_new_tokens: int
    distribution: LengthDistribution | None
    served_at_arrival_tokens: int
    generated_tokens: int = 0
    num_yields: int = 0
    forecast: object = field(default=None, repr=False)
    memo: object = field(default=None, repr=False)
