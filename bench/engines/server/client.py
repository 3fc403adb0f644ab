"""Sends requests to a server through SGLang's own benchmark (sglang.benchmark.serving).

SGLang takes ten seconds of a core to import, so it is imported when the first request is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bench.workloads.prompts import WorkloadRequest

if TYPE_CHECKING:
    from sglang.benchmark.datasets import DatasetRow

# What SGLang's request function reads of its command line.
_SGLANG_ARGS = argparse.Namespace(
    temperature=0.0,
    top_p=1.0,
    disable_ignore_eos=True,
    disable_stream=False,
    return_logprob=False,
    return_routed_experts=False,
    logprob_start_len=-1,
    top_logprobs_num=0,
    token_ids_logprob=None,
    cache_report=False,
    header=None,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request. Times in seconds; error is "" where it went well.

    sent_s, first_token_s, last_token_s: since the run began. late_s: how long after its arrival
    time it was sent, which a busy client alone is to blame for.
    """

    request: WorkloadRequest
    input_tokens: int
    output_tokens: int
    sent_s: float
    first_token_s: float
    last_token_s: float
    late_s: float
    error: str

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.sent_s

    @property
    def ttlt_s(self) -> float:
        return self.last_token_s - self.sent_s


@dataclass(frozen=True, slots=True)
class ServedRun:
    """One run: its answers in order of arrival, its duration, SGLang's metrics by their names
    (none where no request was answered)."""

    answers: tuple[Answer, ...]
    duration_s: float
    metrics: dict[str, float]

    def problem(self) -> str:
        """Why the run must not be counted, or ""."""
        failed = [answer for answer in self.answers if answer.error]
        if not failed:
            return ""
        return f"{len(failed)} of {len(self.answers)} requests failed: {failed[0].error}"


def drive(
    url: str,
    requests: Sequence[WorkloadRequest],
    arrivals_s: Sequence[float],
    *,
    tokenizer: Any,
    max_new_tokens: int,
    timeout_s: float,
    label: str,
    speed: float = 1.0,
) -> ServedRun:
    """Send each request at its arrival time (ascending) and wait for all the answers.

    max_new_tokens: the cap that every request carries. What is not answered timeout_s after the
    last arrival is counted as failed. label: for the progress bar. speed: how many times faster
    than life the server is; all times given and returned are life-size.
    """
    from sglang.benchmark import serving

    serving.set_ulimit(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    serving.set_global_args(_SGLANG_ARGS)
    rows = [_row(request, tokenizer, max_new_tokens) for request in requests]
    sent_s = [arrival_s / speed for arrival_s in arrivals_s]
    began, outputs, late_s = asyncio.run(_send_all(url, rows, sent_s, timeout_s / speed, label))
    duration_s = (time.perf_counter() - began) * speed
    for output in outputs:
        output.start_time = (output.start_time - began) * speed
        output.latency *= speed
        output.ttft *= speed
        output.itl = [seconds * speed for seconds in output.itl]
    numbers = {}
    if any(output.success for output in outputs):  # SGLang's function fails where none did
        metrics, _ = serving.calculate_metrics(rows, outputs, duration_s, tokenizer, "sglang")
        numbers = {name: float(value) for name, value in dataclasses.asdict(metrics).items()}
    answers = tuple(
        Answer(
            request=request,
            input_tokens=output.prompt_len,
            output_tokens=output.output_len,
            sent_s=output.start_time,
            first_token_s=output.start_time + output.ttft,
            last_token_s=output.start_time + output.latency,
            late_s=late * speed,
            error=_error(request, output, max_new_tokens),
        )
        for request, output, late in zip(requests, outputs, late_s, strict=True)
    )
    return ServedRun(answers, duration_s, numbers)


def _row(request: WorkloadRequest, tokenizer: Any, max_new_tokens: int) -> DatasetRow:
    from sglang.benchmark.datasets import DatasetRow

    from bench.workloads.forced_length import LENGTH_KEY, ForcedLength

    num_tokens = _forced_length(request, max_new_tokens)
    return DatasetRow(
        prompt=request.prompt,
        prompt_len=len(tokenizer.encode(request.prompt)),
        output_len=num_tokens,
        extra_request_body={
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "custom_params": {LENGTH_KEY: num_tokens},
            },
            "custom_logit_processor": ForcedLength.to_str(),
        },
    )


def _forced_length(request: WorkloadRequest, max_new_tokens: int) -> int:
    # Below the cap, so that every answer ends at its end token; and not that token alone, which
    # has no text, so that SGLang's client would see no first token.
    return min(max(request.output_tokens, 2), max_new_tokens - 1)


async def _send_all(
    url: str, rows: list[DatasetRow], arrivals_s: Sequence[float], timeout_s: float, label: str
) -> tuple[float, list[Any], list[float]]:
    """The start on time.perf_counter's clock, SGLang's RequestFuncOutputs and the lateness."""
    from sglang.benchmark import serving

    began = time.perf_counter()
    late_s = [0.0] * len(rows)
    with tqdm(total=len(rows), desc=label, unit="req", leave=False, mininterval=1) as progress:

        async def send(i: int) -> Any:
            await asyncio.sleep(began + arrivals_s[i] - time.perf_counter())
            late_s[i] = time.perf_counter() - began - arrivals_s[i]
            call = serving.RequestFuncInput(
                prompt=rows[i].prompt,
                api_url=f"{url}/generate",
                prompt_len=rows[i].prompt_len,
                # Goes back as the length where no token came, so that this is noticed. The body's
                # own max_new_tokens is what the server gets.
                output_len=0,
                model="",
                lora_name="",
                image_data=None,
                extra_request_body=rows[i].extra_request_body,
            )
            try:
                async with asyncio.timeout_at(deadline):
                    return await serving.async_request_sglang_generate(call, progress)
            except TimeoutError:
                output = serving.RequestFuncOutput.init_new(call)
                output.error = f"no answer {timeout_s:.0f} s after the last arrival"
                return output

        deadline = asyncio.get_running_loop().time() + arrivals_s[-1] + timeout_s
        outputs = await asyncio.gather(*(send(i) for i in range(len(rows))))
    return began, outputs, late_s


def _error(request: WorkloadRequest, output: Any, max_new_tokens: int) -> str:
    if not output.success:
        text = str(output.error).strip()
        return (text.splitlines()[-1] if "Traceback" in text else text[:300]) or "no answer"
    # SGLang's client takes an error inside the stream for an answer, of the length asked for.
    if output.ttft == 0.0:
        return "no token came"
    wanted = _forced_length(request, max_new_tokens)
    if output.output_len != wanted:
        return f"{output.output_len} tokens came instead of {wanted}"
    return ""
