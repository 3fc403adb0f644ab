"""Reads SGLang's request log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.errors import NoRequestError
from predictor_store.logs.fields import Row, cap, parsed
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.messages import was_cut
from predictor_store.logs.request import LoggedRequest

# SGLang cuts longer texts in their middle at --log-requests-level 2.
_CUT_TEXT_CHARS = 2048 + len("...")


def _read(row: Row, context: Context) -> LoggedRequest:
    if row.data["event"] != "request.finished":
        raise NoRequestError
    asked, meta = row.data["obj"], row.data["out"]["meta_info"]
    row.used("arrival", "timestamp - e2e_latency")
    ids: Any = asked.get("input_ids")
    if not (isinstance(ids, list) and ids and isinstance(ids[0], int) and "..." not in ids):
        ids = ()
    text = asked.get("text")
    if not isinstance(text, str):
        tokenizer = context.tokenizer
        text = str(tokenizer.decode(list(ids))) if ids and tokenizer is not None else ""
    elif len(text) == _CUT_TEXT_CHARS:
        text = text[:1024]  # the part before the cut
    ttlt_s = row.seconds("time to last token", "out.meta_info.e2e_latency") or 0.0
    reason, at = meta.get("finish_reason"), row.data["timestamp"]
    return LoggedRequest(
        arrival=None if at is None else context.clock.read(at, "s") - ttlt_s,
        input_tokens=row.tokens("input", "out.meta_info.prompt_tokens"),
        output_tokens=row.tokens("output", "out.meta_info.completion_tokens"),
        cap_tokens=_cap_of(asked),
        is_cut=was_cut(reason),
        prompt=text,
        ids=ids,
        ttlt_s=ttlt_s,
    )


def _read_exported(row: Row, context: Context) -> LoggedRequest:
    """Return the request of an exported row. Its request_parameters are the log's "obj", and the
    row itself is the log's "meta_info"."""
    parameters = parsed(row.data["request_parameters"])
    received = row.find("arrival", "request_received_ts")
    end = row.find("arrival", "response_sent_to_client_ts", "request_finished_ts")
    event = {"event": "request.finished", "obj": parameters, "out": {"meta_info": row.data}}
    request = _read(
        Row({**event, "timestamp": received if end is None else end}, row.usage), context
    )
    if received is not None:
        request.arrival = context.clock.read(received, "s")
    elif end is None:
        context.notes.add("streams have times only with --enable-metrics")
    return request


def _cap_of(asked: Mapping[str, Any]) -> int | None:
    # As in sglang/srt/sampling/sampling_params.py: a missing cap is 128, and null is no cap.
    sampling = asked.get("sampling_params")
    if not isinstance(sampling, Mapping):
        return None
    given = sampling.get("max_new_tokens", 128)
    return 0 if given is None else cap(given, "max_new_tokens")


EXPORTED = Reader(_read_exported)
READER = Reader(_read)
