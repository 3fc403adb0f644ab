"""What we keep for one HTTP process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.utils import TypeBasedDispatcher

from patches.http.dispatch import Dispatch
from patches.http.metrics import HttpMetrics
from patches.http.settings_route import add_settings_route
from patches.http.urgency import UrgencyGuess
from patches.messages import StepTimes, dispatches
from predictor_store.service.client import PredictorClient
from sage_sched.config import SageConfig
from sage_sched.slo import SloClaims


@dataclass(slots=True)
class HttpState:
    """`TokenizerManager.sage`.

    predicts: whether it predicts lengths, and learns them. A prefill server sees one token of each
        answer; the decode server, which gets the same request, sees all.
    client: asks the prediction worker. claims: which SLO a request may claim. urgency: guesses how
    urgent a request is. dispatch: picks replicas, None if SGLang does. settings: the communicator
    of /sage/settings, None without an HTTP server.
    """

    config: SageConfig
    predicts: bool
    client: PredictorClient
    claims: SloClaims
    urgency: UrgencyGuess
    metrics: HttpMetrics
    dispatch: Dispatch | None
    settings: Any

    @classmethod
    def of(cls, manager: TokenizerManager, server_args: ServerArgs) -> HttpState:
        """Adds the route /sage/settings as well, and starts the prediction worker."""
        config: SageConfig = server_args._sage_config
        client = PredictorClient(config, server_args.served_model_name or server_args.model_path)
        labels = manager.metrics_collector.labels if manager.enable_metrics else None
        dispatch = None
        if dispatches(server_args, config):
            dispatch = Dispatch(server_args.dp_size, config, manager.load_snapshot_reader)
            manager._result_dispatcher += TypeBasedDispatcher([(StepTimes, dispatch.told)])
        made = cls(
            config,
            server_args.disaggregation_mode != "prefill",
            client,
            SloClaims(config.slo),
            UrgencyGuess(config.urgency),
            HttpMetrics(client, labels),
            dispatch,
            add_settings_route(manager),
        )
        if made.predicts:
            client.start()  # the schedulers are loading the model meanwhile
        return made

    def stats(self) -> dict[str, Any]:
        """For /server_info, beside what the schedulers say there."""
        said: dict[str, Any] = {"predictor": self.client.stats(), "urgency": self.urgency.stats()}
        if self.dispatch is not None:
            said["router"] = self.dispatch.stats()
        return said


def http_state(manager: TokenizerManager) -> HttpState | None:
    """None if the manager's --schedule-policy is not ours."""
    state: HttpState | None = getattr(manager, "sage", None)
    return state
