"""What a request takes on a server that is otherwise idle: the yardstick of waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from bench.engines.clock.device import Device
from bench.engines.server.client import Answer
from bench.engines.simulator.result import alone_s


class Unloaded(Protocol):
    """Time to the last token of a request that is alone on the server."""

    def seconds(self, input_tokens: int, output_tokens: int) -> float:
        """Of a request of these lengths."""

    @property
    def description(self) -> str:
        """For reports."""


@dataclass(frozen=True, slots=True)
class ModelledTime:
    """On a device clock: what the steps of such a request take."""

    device: Device

    def seconds(self, input_tokens: int, output_tokens: int) -> float:
        return alone_s(self.device.engine, input_tokens, output_tokens)

    @property
    def description(self) -> str:
        return f"by the step times of {self.device.preset}"


class UnloadedTime(NamedTuple):
    """On a server whose steps nobody knows:
    base_s + input tokens * per_input_token_s + output tokens * per_output_token_s."""

    base_s: float
    per_input_token_s: float
    per_output_token_s: float

    def seconds(self, input_tokens: int, output_tokens: int) -> float:
        return (
            self.base_s
            + input_tokens * self.per_input_token_s
            + output_tokens * self.per_output_token_s
        )

    @property
    def description(self) -> str:
        return (
            f"{self.base_s * 1e3:.0f} ms + {self.per_input_token_s * 1e3:.3f} ms per input token "
            f"+ {self.per_output_token_s * 1e3:.3f} ms per output token"
        )

    @classmethod
    def fitted(cls, answers: Sequence[Answer]) -> UnloadedTime:
        """From requests that were answered one at a time: least squares of the relative error,
        no coefficient below 0."""
        measured = np.array([answer.ttlt_s for answer in answers])
        terms = np.array([[1.0, a.input_tokens, a.output_tokens] for a in answers])
        coefficients = np.zeros(3)
        kept = [0, 1, 2]
        while kept:
            scaled = terms[:, kept] / measured[:, None]
            solution = np.linalg.lstsq(scaled, np.ones(measured.size), rcond=None)[0]
            if (solution >= 0).all():
                coefficients[kept] = solution
                break
            kept.pop(int(np.argmin(solution)))
        return cls(*coefficients.tolist())
