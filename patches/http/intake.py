"""Handles an incoming request: strips and validates it, makes its hints, and asks for its
prediction. Once SGLang has tokenized it, puts hints and prediction into custom_params."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput as Tokenized
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from patches import carrier
from patches.http.asked import asked_of, eos_ids_of, scope_of
from patches.http.batches import batch_of
from patches.http.gateways import gateway_class, gateway_hints, max_wait_ms
from patches.http.incoming import incoming, new_parts, parts_of, prompt_text, route_of
from patches.http.refused import DRY_RUN_HEADER
from patches.http.state import HttpState
from patches.http.validation import check_body, check_prompt, check_tokenized
from predictor_store.predict.asked import digest
from predictor_store.service.client import Prediction
from sage_sched.distribution import LengthDistribution

_TENANT_HEADER = "x-sage-tenant"


def open_body(obj: GenerateReqInput, request: Any) -> None:
    """Strip and validate a client's fields before SGLang uses them. Raises ValueError."""
    given = obj.sampling_params
    is_list = isinstance(given, list)
    obj.sampling_params = [_stripped(each) for each in given] if is_list else _stripped(given)
    check_body(obj, route_of(request))


def _stripped(sampling: Any) -> Any:
    """Return sampling parameters without our reserved keys: a copy, because a batch may share
    one."""
    given = sampling.get("custom_params") if isinstance(sampling, dict) else None
    if not isinstance(given, dict):
        return sampling
    return {**sampling, "custom_params": carrier.strip(given)}


def receive(manager: TokenizerManager, ours: HttpState, obj: GenerateReqInput, req: Any) -> None:
    """Validate the prompts of a request or a batch, then make hints and ask for predictions. Raises
    ValueError.

    req: FastAPI's request; None without an HTTP server.
    """
    if not (parts := new_parts(manager, obj, req)):
        return
    headers = {} if req is None else req.headers
    # SGLang has read the body by now, if there is one.
    given = gateway_hints(ours.config.hints.trust, headers, getattr(req, "_json", None))
    priority = given.pop("priority", None)
    for part in parts:
        check_prompt(manager, part)
    incoming(obj).came_s = monotonic()
    for part in parts:
        if priority is not None:
            part.priority = priority
        incoming(part).came_s = incoming(obj).came_s
        incoming(part).is_dry_run = DRY_RUN_HEADER in headers
        if incoming(part).is_dry_run and part.session_params:
            raise ValueError("a dry run has no session_params: SGLang would change the session")
        text = prompt_text(manager, part)
        _hint(manager, ours, part, headers, given, len(parts))
        _predict(manager, ours, part, text)


def begin(obj: GenerateReqInput) -> None:
    """Record that nothing holds a request or a batch back any more. All requests of a batch have
    begun, although SGLang tokenizes them one by one and each waits for its prediction."""
    begun_s = monotonic()
    for part in parts_of(obj):
        incoming(part).begun_s = begun_s


def _hint(
    manager: TokenizerManager,
    ours: HttpState,
    obj: GenerateReqInput,
    headers: Mapping[str, str],
    given: Mapping[str, Any],
    num_prompts: int,
) -> None:
    """Set a request's hints. given: hints of a gateway. num_prompts: of its call."""
    kept, trust = incoming(obj), ours.config.hints.trust
    sampling = obj.sampling_params if isinstance(obj.sampling_params, dict) else {}
    own = (sampling.get("custom_params") or {}) if trust == "body" else {}
    kept.expected_tokens = given.get("expected_tokens")
    hints = ours.claims.hints(
        ours.claims.class_of(gateway_class(headers), obj.priority, only_asks=kept.is_dry_run) or "",
        carrier.clients_hints({**given, **own}),
        obj.priority,
        headers.get(_TENANT_HEADER, ""),
    )
    hints = replace(hints, max_wait_ms=max_wait_ms(ours.config.slo.trust, headers))
    if not kept.is_dry_run:
        said = sampling.get("custom_params") or {}
        part = batch_of(ours.config.slo.trust, headers, said, num_prompts)
        num_samples = sampling.get("n", 1)
        if part is not None and type(num_samples) is int and num_samples > 1:
            # Trap: SGLang sends one request more, which caches the prompt.
            part = replace(part, num_requests=part.num_requests * (1 + num_samples))
        kept.batch = part
    if kept.is_dry_run:
        hints = replace(hints, session="")
    elif not hints.session:
        session = _session_of(manager, obj) or _chat_of(obj, hints.tenant)
        hints = replace(hints, session=session)
    kept.hints = hints


def _session_of(manager: TokenizerManager, obj: GenerateReqInput) -> str:
    """Return a name for a request's SGLang session; "" if it has none."""
    params = obj.session_params
    name = params.get("id") if isinstance(params, dict) else None
    # Without --enable-session-radix-cache session_id names the client, and SGLang keeps no KV for
    # it.
    if manager.server_args.enable_session_radix_cache:
        name = name or obj.session_id
    return carrier.session_of(name) if isinstance(name, str) and name else ""


def _chat_of(obj: GenerateReqInput, tenant: str) -> str:
    """Return a name for a chat, by its beginning. Return "" for other requests, and for several
    samples of one, which would look like a chat that continues at once."""
    asked, sampling = incoming(obj).asked, obj.sampling_params
    num_samples = sampling.get("n") if isinstance(sampling, dict) else None
    if asked is None or not asked.session or num_samples not in (None, 1):
        return ""
    return digest(tenant, scope_of(obj).adapter, asked.session)


def _predict(
    manager: TokenizerManager, ours: HttpState, obj: GenerateReqInput, text: str | None
) -> None:
    """Ask for the prediction of a request."""
    kept = incoming(obj)
    if kept.is_internal or not ours.predicts:
        return
    if text is None:  # without the prior, clients could keep requests unpredicted
        kept.prediction = asyncio.get_running_loop().create_future()
        kept.prediction.set_result(Prediction(None, ours.client.prior))
        return
    scope = scope_of(obj, eos_ids_of(manager)).name
    predicted = ours.client.predict(text, scope, asked_of(obj, kept.asked, kept.hints.tenant))
    kept.prediction = asyncio.ensure_future(ours.metrics.timed(predicted))


async def encode(manager: TokenizerManager, obj: GenerateReqInput, tokenized: Tokenized) -> None:
    """Validate SGLang's tokenized request, wait for its prediction, and put our data for the
    scheduler into custom_params. Raises ValueError."""
    check_tokenized(manager, obj, tokenized)
    sampling, kept = tokenized.sampling_params, incoming(obj)
    carried = carrier.encode_hints(kept.hints)
    carried |= carrier.encode_asked(str(obj.rid), kept.came_s, kept.begun_s)
    if kept.batch is not None:
        carried |= carrier.encode_batch(kept.batch)
    if kept.is_dry_run:
        carried |= carrier.DRY_RUN
    if kept.prediction is not None:
        prediction = await kept.prediction
        kept.handle, lengths = prediction.handle, prediction.distribution
        knows_no_better = lengths is None or lengths.source == "prior"
        if knows_no_better and kept.expected_tokens is not None:
            lengths = LengthDistribution.from_samples([kept.expected_tokens], "hint")
        if lengths is not None:
            cap_tokens = sampling.max_new_tokens
            carried |= carrier.encode(lengths if cap_tokens is None else lengths.capped(cap_tokens))
    sampling.custom_params = {**(sampling.custom_params or {}), **carried}


def is_encoded(tokenized: Tokenized) -> bool:
    """Whether encode() has run."""
    return carrier.decode_asked(tokenized.sampling_params.custom_params) is not None
