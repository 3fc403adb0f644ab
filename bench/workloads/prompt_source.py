"""Makes requests from prompts with known answer lengths, and predicts them as a server would."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.policies.arm import Arm
from bench.policies.rival import Rival
from bench.policies.srpt_oracle import ORACLE
from bench.simulator.radix_tree import Span
from bench.simulator.request import SimRequest
from bench.simulator.stock import STOCK
from bench.workloads import chats, datasets
from bench.workloads.predictors import (
    Predict,
    Predictors,
    changed,
    token_counter,
    truth,
    with_noise,
)
from bench.workloads.prompts import (
    Workload,
    WorkloadError,
    WorkloadRequest,
    stable_hash,
)
from bench.workloads.source import Draw, Purpose, Source

# mixed: real prompts, half of them with drawn lengths.
_OF_DATA: dict[str, Callable[[Path], Workload]] = {
    "levels": datasets.load_mixed,
    "mixed": datasets.load_mixed,
    "real": datasets.load_real,
    "repeated": datasets.load_repeated,
    "reasoning": datasets.load_reasoning,
    "samples": datasets.load_samples,
    "shift": datasets.load_shift,
    "tenants": datasets.load_mixed,
}
_GENERATED: dict[str, Callable[[], Workload]] = {
    "chats": chats.answered,
    "generated": lambda: chats.generated(3000),
}
WORKLOADS = (*_OF_DATA, *_GENERATED)


def load_workload(data: Path | None, name: str) -> Workload:
    """Return one of WORKLOADS, from the data folder, or generated. Raises WorkloadError if it needs
    the folder and there is none, or the reverse."""
    if name in _GENERATED:
        if data is not None:
            raise WorkloadError(f"{name} makes its own prompts: it does not go with --data")
        return _GENERATED[name]()
    if name not in WORKLOADS:
        raise WorkloadError(f"there is no workload {name!r}, allowed: {', '.join(WORKLOADS)}")
    return _OF_DATA[name](datasets.given(data, name, name))


class Prompts(Source):
    """A workload's requests. One half is for tuning.

    classes: the classes to draw from; all by default.
    prompt_factor: a factor on input tokens, for example from abstracts to whole papers.
    as_servers: whether reports draw from all prompts, so that the simulator and servers serve the
        same requests.
    """

    def __init__(
        self,
        data: Path | None,
        name: str,
        *,
        classes: Sequence[str] = (),
        prompt_factor: int = 1,
        as_servers: bool = False,
    ) -> None:
        self._predictors = _predictors(data, name)
        self.workload: Workload = self._predictors.workload
        known = {of.class_name for of in (*self.workload.history, *self.workload.evaluation)}
        if unknown := set(classes) - known:
            raise WorkloadError(
                f"{name} has no requests of class {', '.join(sorted(unknown))}, only of "
                f"{', '.join(sorted(known))}"
            )
        self._classes = classes
        self._factor = prompt_factor
        self._as_servers = as_servers

    def requests(self, draw: Draw) -> list[SimRequest]:
        predictors = self._predictors
        chosen = self._chosen(draw)
        predictors.read(chosen, draw.arm.config.predictor.encoder)
        predict = self._predict(draw.arm, draw.cap)
        return [
            SimRequest(
                arrival_s=float(at),
                input_tokens=self._factor * predictors.input_tokens(request.prompt),
                output_tokens=min(request.output_tokens, draw.cap),
                max_new_tokens=draw.cap,
                distribution=predict(request),
                class_name=request.class_name,
                spans=self._spans(request.prompt),
            )
            for at, request in zip(draw.arrivals_s, chosen, strict=True)
        ]

    def for_servers(self, draw: Draw) -> list[SimRequest]:
        """Return prompts. Unless they measure a capacity, each comes once, because a server would
        know the length of a repeated answer. Servers count the input tokens, and predict."""
        is_history = draw.purpose == Purpose.CAPACITY
        chosen = self.workload.drawn(
            draw.number,
            draw.seed,
            self._is_of_classes,
            from_history=is_history,
            again=is_history,
        )
        return [
            SimRequest(
                float(at), 0, request.output_tokens, draw.cap, None, request.class_name,
                prompt=" ".join([request.prompt] * self._factor),
            )
            for at, request in zip(draw.arrivals_s, chosen, strict=False)
        ]  # fmt: skip

    def _spans(self, prompt: str) -> tuple[Span, ...]:
        """Return the prompt's tokens if other requests have the same prompt, and otherwise
        nothing."""
        if self.workload.num_samples == 1:
            return ()
        num_tokens = self._factor * self._predictors.input_tokens(prompt)
        return ((stable_hash("stream " + prompt), 0, num_tokens),)

    def _chosen(self, draw: Draw) -> list[WorkloadRequest]:
        return self.workload.drawn(
            draw.number,
            draw.seed,
            lambda request: self._is_for(request, draw.purpose),
            from_history=draw.purpose == Purpose.CAPACITY,
        )

    def _is_of_classes(self, request: WorkloadRequest) -> bool:
        return not self._classes or request.class_name in self._classes

    def _is_for(self, request: WorkloadRequest, purpose: Purpose) -> bool:
        if not self._is_of_classes(request):
            return False
        if self._as_servers and purpose == Purpose.REPORT:
            return True
        is_for_tuning = stable_hash("half " + request.prompt) % 2 == 1
        return purpose == Purpose.CAPACITY or is_for_tuning == (purpose == Purpose.TUNING)

    def _predict(self, arm: Arm, cap: int) -> Predict:
        policy = Rival.parse(arm.policy).policy
        if policy in STOCK:
            return lambda request: None
        if policy == ORACLE or arm.predictor == "truth":
            return truth
        predictors = self._predictors
        match arm.predictor:
            case "input length":
                predict = predictors.of_input_length()
            case "none":
                predict = predictors.blind()
            case _:
                predict = predictors.semantic(arm.config.predictor)
        if arm.wrong_by != 1:
            predict = changed(predict, lambda found: found.scaled(arm.wrong_by))
        return with_noise(predict, cap) if arm.noise else predict


@functools.cache
def _predictors(data: Path | None, name: str) -> Predictors:
    return Predictors(load_workload(data, name), token_counter())
