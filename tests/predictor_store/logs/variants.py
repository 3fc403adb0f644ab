"""The same requests as the field's tools write them, one variant for each way of a reader."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """at_s: after the first. ttlt_s: to its last token."""

    at_s: float
    inputs: int
    outputs: int
    number: int

    @property
    def start_s(self) -> float:
        return 1_790_000_000.0 + self.at_s

    @property
    def ttlt_s(self) -> float:
        return 0.3 + self.outputs / 64

    @property
    def end_s(self) -> float:
        return self.start_s + self.ttlt_s

    @property
    def text(self) -> str:
        return f"Question number {self.number}: why?"

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": self.text}]

    @property
    def usage(self) -> dict[str, Any]:
        details = {"reasoning_tokens": 3}
        return {"prompt_tokens": self.inputs, "completion_tokens": self.outputs,
                "completion_tokens_details": details}  # fmt: skip


def made(num: int = 60, rate: float = 4.0) -> list[Asked]:
    rng, at_s, found = random.Random(3), 0.0, list[Asked]()
    for number in range(num):
        found.append(Asked(round(at_s, 3), rng.randint(40, 900), rng.randint(8, 700), number))
        at_s += rng.expovariate(rate)
    return found


def date(seconds: float, zone: str = "Z", mark: str = "T") -> str:
    when = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    return when.isoformat(mark, "microseconds") + zone


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
ANSWER = {"role": "assistant", "content": "So."}


def langfuse(a: Asked, **more: Any) -> dict[str, Any]:
    return {
        "traceId": f"t{a.number // 4}", "type": "GENERATION", "startTime": date(a.start_s),
        "endTime": date(a.end_s), "level": "DEFAULT", "input": json.dumps(a.messages),
        "output": json.dumps(CALL), "modelParameters": {"max_tokens": "Infinity"},
        "usageDetails": {
            "input": a.inputs - 9, "input_cached_tokens": 9, "output": a.outputs - 5,
            "output_reasoning_tokens": 5, "total": a.inputs + a.outputs,
        },
        **more,
    }  # fmt: skip


def span(a: Asked) -> dict[str, Any]:
    messages = [{"role": "user", "parts": [{"type": "text", "content": a.text}]}]
    attributes = {
        "gen_ai.operation.name": {"stringValue": "chat"},
        "gen_ai.usage.input_tokens": {"intValue": str(a.inputs)},
        "gen_ai.usage.output_tokens": {"intValue": a.outputs},
        "gen_ai.response.finish_reasons": {"arrayValue": {"values": [{"stringValue": "stop"}]}},
        "gen_ai.input.messages": {"stringValue": json.dumps(messages)},
    }
    return {
        "traceId": f"{a.number // 4:032x}", "spanId": "1", "status": {},
        "startTimeUnixNano": str(round(a.start_s * 1e9)),
        "endTimeUnixNano": str(round(a.end_s * 1e9)),
        "attributes": [{"key": key, "value": value} for key, value in attributes.items()],
    }  # fmt: skip


def aiperf(a: Asked, **metrics: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "request_start_ns": round(a.start_s * 1e9), "request_end_ns": round(a.end_s * 1e9),
            "benchmark_phase": "profiling", "x_correlation_id": "c", "turn_index": 0,
        },
        "metrics": {"input_sequence_length": {"value": a.inputs, "unit": "tokens"}, **metrics},
        "error": None,
    }  # fmt: skip


def value(number: int) -> dict[str, Any]:
    return {"value": number, "unit": "tokens"}


def dynamo(a: Asked) -> dict[str, Any]:
    return {
        "schema": "dynamo.request.trace.v1", "event_type": "request_end",
        "event_time_unix_ms": round(a.end_s * 1e3),
        "agent_context": {"session_id": f"s{a.number // 4}"},
        "request": {
            "request_received_ms": round(a.start_s * 1e3), "input_tokens": a.inputs,
            "output_tokens": a.outputs, "total_time_ms": a.ttlt_s * 1e3,
            "replay": {"trace_block_size": 16, "input_sequence_hashes": [2**63 + 1, 2**64 - 1]},
        },
    }  # fmt: skip


def guidellm(asked: Sequence[Asked]) -> dict[str, Any]:
    rows = [
        {"request_start_time": a.start_s, "request_end_time": a.end_s, "prompt_tokens": a.inputs,
         "output_tokens": a.outputs,
         "request_args": json.dumps({"body": {"messages": a.messages}})}
        for a in asked
    ]  # fmt: skip
    groups = {"successful": rows, "errored": [{"x": 1}], "incomplete": []}
    return {"metadata": {}, "benchmarks": [{"requests": groups, "metrics": {}}]}


def weka(asked: Sequence[Asked]) -> dict[str, Any]:
    steps = [
        {"t": a.at_s, "type": "s", "in": a.inputs, "out": a.outputs, "hash_ids": [1, 2],
         "api_time": a.ttlt_s}
        for a in asked
    ]  # fmt: skip
    sub = {"type": "subagent", "t": asked[2].at_s, "agent_id": "x", "requests": steps[2:5]}
    requests = [*steps[:2], sub, *steps[5:]]
    return {"id": "trace_0", "block_size": 64, "hash_id_scope": "local", "requests": requests}


def csv_of(head: str, rows: Callable[[Asked], Sequence[Any]], separator: str = ",") -> Any:
    def write(asked: Sequence[Asked]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=separator)
        writer.writerows([head.split(","), *map(rows, asked)])
        return text.getvalue()

    return write


def lines_of(row: Callable[[Asked], Any]) -> Any:
    return lambda asked: "".join(f"{json.dumps(row(a))}\n" for a in asked)


def array_of(row: Callable[[Asked], Any]) -> Any:
    return lambda asked: json.dumps([row(a) for a in asked], indent=1)


def whole_of(document: Callable[[Sequence[Asked]], Any]) -> Any:
    return lambda asked: json.dumps(document(asked), indent=1)


class Variant(NamedTuple):
    """format: its name. resolution_s: of its times; inf if it has none. has: "p" prompts, "t" times
    to the last token, "c" caps of 800, "s" sessions; "-" if it has no lengths."""

    format: str
    write: Callable[[Sequence[Asked]], str]
    has: str = ""
    resolution_s: float = 1e-3


NO_TIMES = float("inf")
VARIANTS: dict[str, Variant] = {
    "SGLang's request log": Variant("sglang", lines_of(lambda a: {
        "timestamp": date(a.end_s, ""), "event": "request.finished",
        "obj": {"text": a.text, "sampling_params": {"max_new_tokens": 800}},
        "out": {"meta_info": {"prompt_tokens": a.inputs, "completion_tokens": a.outputs,
                              "e2e_latency": a.ttlt_s, "finish_reason": {"type": "stop"}}},
    }), "ptc"),
    "aiperf": Variant("aiperf", lines_of(lambda a: aiperf(
        a, output_token_count=value(a.outputs - 4), reasoning_token_count=value(4))), "ts"),
    "guidellm": Variant("guidellm", whole_of(guidellm), "pt"),
    "inference-perf": Variant("inference-perf", array_of(lambda a: {
        "start_time": 1e4 + a.at_s, "end_time": 1e4 + a.at_s + a.ttlt_s, "error": None,
        "request": json.dumps({"messages": a.messages, "max_completion_tokens": 800}),
        "response": "{}", "info": {
            "request_metrics": {"text": {"input_tokens": a.inputs}}, "input_tokens": a.inputs,
            "response_metrics": {"output_tokens": 1, "server_usage": a.usage}},
    }), "ptc"),
    "Dynamo": Variant(
        "dynamo", lines_of(lambda a: {"timestamp": 1, "event": dynamo(a)}), "ts"),
    "LiteLLM's standard payload": Variant("litellm", lines_of(lambda a: {
        "id": "x", "trace_id": f"t{a.number // 4}", "call_type": "acompletion",
        "status": "success", "startTime": a.start_s, "endTime": a.end_s,
        "prompt_tokens": a.inputs, "completion_tokens": a.outputs, "cache_hit": None,
        "model_parameters": {"max_tokens": 800}, "messages": a.messages,
        "response": {"choices": [{"message": CALL}]},
    }), "ptcs"),
    "Langfuse": Variant("langfuse", lines_of(langfuse), "pts"),
    "Langfuse's traces": Variant("langfuse", lines_of(lambda a: {
        "id": "t", "timestamp": date(a.start_s), "input": "x", "output": "y",
        "observations": [langfuse(a)]}), "pts"),
    "Langfuse's blob storage": Variant("langfuse", lines_of(lambda a: {
        "trace_id": "t", "type": "GENERATION", "start_time": date(a.start_s, "", " "),
        "end_time": date(a.end_s, "", " "), "input": a.text, "output": "So.",
        "usage_details": {"input": a.inputs, "output": a.outputs, "total": a.inputs + a.outputs},
    }), "pts"),
    "Langfuse as CSV": Variant("langfuse", csv_of(
        "id,type,startTime,endTime,traceId,level,inputUsage,outputUsage,input,output",
        lambda a: (1, "GENERATION", date(a.start_s), date(a.end_s), "t", "DEFAULT", a.inputs,
                   a.outputs, json.dumps({"messages": a.messages}), "So.")), "pts"),
    "OTLP": Variant("otel", whole_of(lambda asked: {"resourceSpans": [{"scopeSpans": [
        {"spans": [span(a) for a in asked]}]}]}), "pts"),
    "spans of Python": Variant("otel", lines_of(lambda a: {
        "context": {"trace_id": "0x1", "span_id": "0x2"}, "start_time": date(a.start_s),
        "end_time": date(a.end_s), "status": {"status_code": "UNSET"},
        "attributes": {"gen_ai.usage.prompt_tokens": a.inputs,
                       "gen_ai.usage.completion_tokens": a.outputs,
                       "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": a.text},
    }), "pts"),
    "flat spans": Variant("otel", lines_of(lambda a: {
        "trace_id": "t", "timestamp": date(a.start_s),
        "attributes.gen_ai.usage.input_tokens": a.inputs,
        "attributes.gen_ai.usage.output_tokens": a.outputs,
    }), "s"),
    "Jaeger": Variant("otel", whole_of(lambda asked: {"data": [{"traceID": "t", "spans": [
        {"traceID": "t", "spanID": "s", "startTime": round(a.start_s * 1e6), "tags": [
            {"key": "llm.token_count.prompt", "value": a.inputs},
            {"key": "llm.token_count.completion", "value": a.outputs}]}
        for a in asked]}]}), "s"),
    "OpenAI's batch": Variant("openai-batch", lines_of(lambda a: {
        "custom_id": f"r{a.number}", "error": None, "response": {"status_code": 200, "body": {
            "created": int(a.start_s), "choices": [{"message": CALL}], "usage": a.usage}},
    }), "", 1.0),
    "request and response": Variant("openai-chat", lines_of(lambda a: {
        "created": int(a.start_s), "request": {"messages": a.messages, "max_tokens": 800},
        "response": {"choices": [{"message": CALL}], "usage": a.usage},
    }), "pc", 1.0),
    "messages with usage": Variant("openai-chat", lines_of(lambda a: {
        "timestamp": date(a.start_s), "messages": [*a.messages, CALL], "usage": a.usage,
    }), "p"),
    "reasoning beside the completion": Variant("openai-chat", lines_of(lambda a: {
        "created": a.start_s, "choices": [{"message": ANSWER}], "usage": {
            "prompt_tokens": a.inputs, "completion_tokens": a.outputs - 5,
            "reasoning_tokens": 5, "total_tokens": a.inputs + a.outputs}})),
    "messages with lengths beside": Variant("openai-chat", lines_of(lambda a: {
        "ts": date(a.start_s), "messages": [*a.messages, CALL], "latency_ms": a.ttlt_s * 1e3,
        "prompt_tokens": a.inputs, "completion_tokens": a.outputs}), "pt"),
    "Anthropic's messages": Variant("openai-chat", lines_of(lambda a: {
        "timestamp": date(a.start_s), "messages": a.messages, "max_tokens": 800,
        "content": [{"type": "text", "text": "So."}], "stop_reason": "end_turn",
        "usage": {"input_tokens": a.inputs - 7, "cache_read_input_tokens": 7,
                  "output_tokens": a.outputs},
    }), "pc"),
    "Gemini's": Variant("openai-chat", lines_of(lambda a: {
        "timestamp": date(a.start_s),
        "request": {"contents": [{"role": "user", "parts": [{"text": a.text}]}]},
        "response": {"candidates": [], "usageMetadata": {
            "promptTokenCount": a.inputs, "candidatesTokenCount": a.outputs - 6,
            "thoughtsTokenCount": 6}},
    }), "p"),
    "responses with reasoning": Variant("openai-chat", lines_of(lambda a: {
        "object": "response", "created_at": a.start_s, "input": a.text,
        "output": [{"type": "reasoning"}, {"type": "message", "content": [{"text": "So."}]}],
        "usage": {"input_tokens": a.inputs, "output_tokens": a.outputs},
    }), "p"),
    "BurstGPT": Variant("burstgpt", csv_of(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens",
        lambda a: (a.at_s, a.number // 4, a.ttlt_s, "m", a.inputs, a.outputs)), "ts"),
    "Azure, 2023": Variant("azure", csv_of(
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        lambda a: (date(a.start_s, "0", " "), a.inputs, a.outputs))),
    "Mooncake": Variant("mooncake", lines_of(lambda a: {
        "timestamp": round(a.at_s * 1e3), "input_length": a.inputs, "output_length": a.outputs,
        "hash_ids": [a.number]})),
    "Mooncake's fields in seconds": Variant("mooncake", lines_of(lambda a: {
        "timestamp": a.at_s, "input_length": a.inputs, "output_length": a.outputs})),
    "Bailian": Variant("bailian", lines_of(lambda a: {
        "chat_id": a.number, "parent_chat_id": a.number - 1, "timestamp": a.at_s, "turn": 1,
        "input_length": a.inputs, "output_length": a.outputs, "type": "text",
        "hash_ids": [*range(-(-a.inputs // 16))]})),
    "Weka": Variant("weka", whole_of(weka), "ts"),
    "vllm bench serve": Variant("bench-serving", lambda asked: json.dumps({
        "request_rate": "inf", "input_lens": [a.inputs for a in asked],
        "output_lens": [a.outputs for a in asked], "ttfts": [0.3] * len(asked),
        "itls": [[1 / 64] * a.outputs for a in asked], "errors": [""] * len(asked),
        "start_times": [7.5 + a.at_s for a in asked],
    }), "t"),
    "Vidur": Variant("table", csv_of("arrived_at,num_prefill_tokens,num_decode_tokens",
                                     lambda a: (a.at_s, a.inputs, a.outputs))),
    "a table in milliseconds": Variant("table", csv_of(
        "Request Time (ms),Prompt Tokens,Completion Tokens,Latency (ms)",
        lambda a: (round(a.at_s * 1e3), a.inputs, a.outputs, a.ttlt_s * 1e3), "\t"), "t"),
    "an array of tables' rows": Variant("table", array_of(lambda a: {
        "arrivalTime": a.at_s, "inputTokens": a.inputs, "outputTokens": a.outputs,
        "maxTokens": 800, "prompt": a.text, "finishReason": "stop"}), "pc"),
    "ShareGPT": Variant("sharegpt", array_of(lambda a: {"id": "x", "conversations": [
        {"from": "human", "value": a.text}, {"from": "gpt", "value": "So."}]}), "p-", NO_TIMES),
    "ShareGPT as CSV": Variant("sharegpt", csv_of("id,conversations", lambda a: (1, json.dumps([
        {"from": "human", "value": a.text}, {"from": "gpt", "value": "So."}]))), "p-", NO_TIMES),
    "pairs in fields": Variant("table", lines_of(
        lambda a: {"human": a.text, "assistant": "So."}), "p-", NO_TIMES),
    "ShareGPT, pairs": Variant("sharegpt", lines_of(lambda a: {"conversation": [
        {"human": a.text, "assistant": "So."}]}), "p-", NO_TIMES),
    "lmsys": Variant("lmsys", lines_of(lambda a: {"conversation_id": "x", "turn": 1,
        "conversation": [{"content": a.text, "role": "user"}, ANSWER]}), "p-", NO_TIMES),
    "WildChat": Variant("wildchat", lines_of(lambda a: {"conversation_hash": "x", "turn": 1,
        "timestamp": date(a.start_s, "+00:00", " "),
        "conversation": [{"content": a.text, "role": "user"}, ANSWER]}), "p-"),
    "UltraChat": Variant("ultrachat", lines_of(
        lambda a: {"id": "0", "data": [a.text, "So.", "And?", "Thus."]}), "p-", NO_TIMES),
    "UltraChat's messages": Variant("openai-chat", lines_of(lambda a: {
        "prompt": a.text, "messages": [*a.messages, ANSWER]}), "p-", NO_TIMES),
}  # fmt: skip
