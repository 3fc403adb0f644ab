from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import load_snapshot
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.utils import TypeBasedDispatcher

from bench.engines.server.model import write_model
from patches.http import state
from patches.http.hooks import http_hooks
from patches.messages import SettingsNow
from predictor_store.data.warm import load_tokenizer
from predictor_store.predict.asked import Asked
from predictor_store.service.client import Prediction
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution

PREDICTED = LengthDistribution.from_samples([70], "history")
PRIOR = LengthDistribution.from_samples([90], "prior")
VOCABULARY, EOS = 1000, 2
COUNTED = ("general", "hint", "history", "none", "prior", "warm")
HTTP_SERVER = "sglang.srt.entrypoints.http_server"


def http_hook(method: str) -> Callable[..., Any]:
    return next(hook.hook for hook in http_hooks if hook.target.endswith(f".{method}"))


def stats(num_answers: int) -> dict[str, Any]:
    """Return the counters of a client after this number of answers."""
    quality = {"num_answers": num_answers, "within_80": 0.25, "crps_gain": -1.0, "widened": True}
    return {
        **{f"num_predicted_{source}": n * num_answers for n, source in enumerate(COUNTED, 1)},
        "num_deadline_misses": 3, "num_unsent": 4, "worker_alive": True, "num_records": 8,
        "num_unwritten": 9, "quality": quality if num_answers else {},
    }  # fmt: skip


class Client:
    """A prediction worker's client. model: of its server."""

    prior = PRIOR
    model = ""
    is_started = False

    def __init__(self) -> None:
        self.distribution: LengthDistribution | None = PREDICTED
        self.asked: list[tuple[str, str, Asked]] = []
        self.heard: list[tuple[Any, ...]] = []

    def made(self, config: SageConfig, model: str) -> Client:
        self.model = model
        return self

    def start(self) -> None:
        self.is_started = True

    async def predict(self, text: str, scope: str, asked: Asked) -> Prediction:
        self.asked.append((text, scope, asked))
        return Prediction(len(self.asked), self.distribution)

    def goes_on(self, *about: Any) -> None:
        self.heard.append(("goes on", *about))

    def finished(self, *about: Any) -> None:
        self.heard.append(("finished", *about))

    def stats(self) -> dict[str, Any]:
        return stats(0)


class Manager:
    """The parts of a TokenizerManager that our hooks read. sent: messages to the schedulers.
    answers: their answers to each. held_back: called while a pause would hold a request back."""

    mm_processor = None
    enable_metrics = False
    server_status = ServerStatus.Up
    _server_stop_hook = print

    def __init__(self, tokenizer: Any, server_args: dict[str, Any], **sections: Any) -> None:
        self.tokenizer = tokenizer
        self.model_config = SimpleNamespace(
            vocab_size=VOCABULARY, hidden_size=2, hf_eos_token_id={EOS}
        )
        given = {
            "served_model_name": None, "model_path": "its/path", "disaggregation_mode": "null",
            "enable_session_radix_cache": False, "tokenizer_worker_num": 1,
            "max_queued_requests": None, **server_args,
        }  # fmt: skip
        self.server_args = SimpleNamespace(_sage_config=SageConfig.parse(sections), **given)
        self.rid_to_state: dict[str, Any] = {}
        self.sent: list[Any] = []
        self.answers: list[SettingsNow] = []
        self._result_dispatcher = TypeBasedDispatcher([])
        self.held_back: Callable[[], None] = lambda: None
        http_hook("__init__")(None, self, self.server_args)

    def auto_create_handle_loop(self) -> None: ...

    def _dispatch_to_scheduler(self, message: Any) -> None:
        self.sent.append(message)
        for answer in self.answers:
            asyncio.get_running_loop().call_soon(self._result_dispatcher, answer)

    def receive(
        self, obj: Any, headers: Any = None, route: str = "generate_request", at_once: bool = False
    ) -> list[Any]:
        """Take a request through our hooks, as SGLang does. Return the requests that it became,
        which carry our data for schedulers in sampling_params.custom_params. at_once: tokenize a
        batch in one call."""
        endpoint = SimpleNamespace(__name__=route)
        request = SimpleNamespace(
            headers=headers or {}, _json=vars(obj), scope={"endpoint": endpoint}
        )
        return asyncio.run(self.received(obj, request, at_once))

    async def received(self, obj: Any, request: Any, at_once: bool = False) -> list[Any]:
        http_hook("generate_request")(self, obj, request)
        obj.normalize_batch_and_arguments()
        http_hook("_init_req_state")(self, obj, request)
        parts = [obj] if obj.is_single else [obj[i] for i in range(obj.batch_size)]
        for part in parts:
            self.rid_to_state[part.rid] = SimpleNamespace(obj=part, dispatched=False)
        self.held_back()
        http_hook("_validate_and_resolve_lora")(self, obj)
        if at_once:

            async def tokenize(manager: Manager, num: int, obj: Any) -> list[Any]:
                return [await self._tokenize(manager, obj[i]) for i in range(num)]

            hook = http_hook("_batch_tokenize_and_process")
            tokenized: list[Any] = await hook(tokenize, self, obj.batch_size, obj)
            return tokenized
        hook = http_hook("_tokenize_one_request")
        return [await hook(self._tokenize, self, part) for part in parts]

    async def _tokenize(self, manager: Any, obj: Any) -> Any:
        sampling = SamplingParams(**obj.sampling_params)
        sampling.normalize(SimpleNamespace(encode=lambda text, **more: list(text)))
        return SimpleNamespace(input_ids=[1], mm_inputs=None, sampling_params=sampling)

    def answer(self, rid: str, num_tokens: int, reason: dict[str, Any] | None) -> None:
        """Receive tokens of an answer from the scheduler, to a prompt of five."""
        output = SimpleNamespace(
            rids=[rid], finished_reasons=[reason],
            prompt_tokens=[5], completion_tokens=[num_tokens],
        )  # fmt: skip
        http_hook("_handle_batch_output")(self, output)

    def abort(self, rid: str, abort_all: bool = False) -> None:
        http_hook("abort_request")(self, rid, abort_all)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(str(write_model(tmp_path_factory.mktemp("model") / "llama")))


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def make_manager(
    tokenizer: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Manager]:
    """Return managers of programs without an HTTP server, which get the client's predictions."""
    monkeypatch.setattr(state, "PredictorClient", client.made)
    monkeypatch.setattr(load_snapshot, "snapshot_decoder", load_snapshot.snapshot_decoder)
    monkeypatch.delitem(sys.modules, HTTP_SERVER, raising=False)

    def made(server_args: dict[str, Any] | None = None, **sections: Any) -> Manager:
        return Manager(tokenizer, server_args or {}, **sections)

    return made


@pytest.fixture
def manager(make_manager: Callable[..., Manager]) -> Manager:
    return make_manager()


def generate(text: str | None = "Why?", sampling: Any = None, **fields: Any) -> GenerateReqInput:
    return GenerateReqInput(text=text, sampling_params=sampling or {}, **fields)
