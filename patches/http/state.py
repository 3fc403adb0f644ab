"""Defines our state of one HTTP process."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from starlette.middleware import Middleware

from patches.http.batches import HEADERS, add_batches_route
from patches.http.gateways import TTL_HEADER
from patches.http.keep_open import KeepsOpen
from patches.http.metrics import HttpMetrics
from patches.http.refused import RefusedResponses
from patches.http.settings_route import add_settings_route
from predictor_store.service.client import PredictorClient
from sage_sched.app.config import SageConfig
from sage_sched.overload.config import OverloadConfig
from sage_sched.slo import SloClaims

_HTTP_SERVER = "sglang.srt.entrypoints.http_server"


class HttpState:
    """Our state of one HTTP process, kept as `TokenizerManager.sage`.

    predicts: whether the process predicts lengths and learns them. A prefill server sees one token
        of each answer; the decode server, which gets the same request, sees all.
    client: asks the prediction worker.
    claims: decides which SLO a request may claim.
    may_refuse: whether requests may be refused, as far as this process knows.
    """

    def __init__(self, manager: TokenizerManager, server_args: ServerArgs) -> None:
        """Add our routes and middleware to the HTTP server, if this program has one, and start the
        prediction worker."""
        self.config: SageConfig = server_args._sage_config
        self.predicts: bool = server_args.disaggregation_mode != "prefill"
        model = server_args.served_model_name or server_args.model_path
        self.client = PredictorClient(self.config, model)
        self.claims = SloClaims(self.config.slo)
        labels = manager.metrics_collector.labels if manager.enable_metrics else None
        self.metrics = HttpMetrics(self.client, labels)
        queue_is_bounded = server_args.max_queued_requests is not None
        self._may_end = queue_is_bounded or envs.SGLANG_REQ_WAITING_TIMEOUT.get() > 0
        # Any request may be a part of a batch, whose time may be too short.
        self._may_end |= self.config.slo.trust == "body"
        self.may_refuse = self._may_end or self.config.overload.may_refuse
        if (server := sys.modules.get(_HTTP_SERVER)) is not None:
            self._extend(server.app, manager)
        if self.predicts:
            self.client.start()  # the schedulers are loading the model meanwhile

    def _extend(self, app: Any, manager: TokenizerManager) -> None:
        """Add our routes and middleware to SGLang's app, which may be serving its warm-up already.

        Comments go behind all other middleware, which then treats a comment as a part of SGLang's
        answer: a held head goes first, with its headers.
        """
        add_settings_route(app, manager, self._switched)
        add_batches_route(app, manager)
        may_end = (TTL_HEADER, *HEADERS) if self.config.slo.trust == "header" else ()
        refused = Middleware(RefusedResponses, lambda: self.may_refuse, may_end)
        app.user_middleware.insert(0, refused)
        interval_s = self.config.http.comment_every_ms / 1e3
        if interval_s < math.inf:
            app.user_middleware.append(Middleware(KeepsOpen, interval_s))
        if app.middleware_stack is not None:
            app.middleware_stack = app.build_middleware_stack()

    def _switched(self, settings: Mapping[str, Any]) -> None:
        overload = OverloadConfig(**settings["overload"])
        self.may_refuse = self._may_end or overload.may_refuse

    def stats(self) -> dict[str, Any]:
        """Return entries for /server_info, next to the schedulers' own."""
        return {"predictor": self.client.stats()}


def http_state(manager: TokenizerManager) -> HttpState | None:
    """Return the state of a manager; None if its --schedule-policy is not ours."""
    state: HttpState | None = getattr(manager, "sage", None)
    return state
