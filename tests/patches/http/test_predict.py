from __future__ import annotations

import asyncio
import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus

from bench.engines.server.model import write_model
from patches.carrier import EXPLAIN, decode, session_of
from patches.http.hooks import _before_init_state, _before_output
from patches.http.predict import (
    RequestPrediction,
    _before_generate,
    _chat_of,
    _session_of,
    attach,
    last_user_text,
    prompt_text,
    start,
)
from patches.http.urgency import UrgencyGuess
from predictor_store.data.warm import load_tokenizer
from predictor_store.predict.asked import Asked
from predictor_store.service.client import Prediction
from sage_sched.config import HintsConfig, SageConfig, UrgencyConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.slo import SloClaims


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_model(tmp_path_factory.mktemp("model") / "llama")
    return SimpleNamespace(tokenizer=load_tokenizer(str(model)))


@pytest.mark.parametrize("ids", [[-1], [10**9], [2**70], [[]], ["a"], [1.5], [], [None]])
def test_no_token_ids_raise(manager: Any, ids: list[Any]) -> None:
    text = prompt_text(manager, SimpleNamespace(text=None, input_ids=ids))
    assert text is None or isinstance(text, str)


def test_the_users_own_words_come_before_the_prompt_made_of_them(manager: Any) -> None:
    obj = SimpleNamespace(
        text="<|user|> Why? <|assistant|>", input_ids=None, sage=RequestPrediction("Why?")
    )
    assert prompt_text(manager, obj) == "Why?"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([("user", "one"), ("assistant", "no"), ("user", "two"), ("tool", "x")], "two"),
        ([("system", "be brief")], None),
        ([], None),
        ([("user", None)], ""),
        (
            [("user", [SimpleNamespace(type="image_url"), SimpleNamespace(type="text", text="a")])],
            "a",
        ),
    ],
)
def test_a_chat_is_known_by_its_last_user_message(
    messages: list[tuple[str, Any]], text: str | None
) -> None:
    chat = [SimpleNamespace(role=role, content=content) for role, content in messages]
    assert last_user_text(chat) == text


def test_a_chat_is_a_session_of_its_tenant_and_adapter_unless_it_has_several_samples() -> None:
    def session(asked: Asked | None, tenant: str = "", **fields: Any) -> str:
        given: dict[str, Any] = {"sampling_params": {}, "lora_path": None, **fields}
        return _chat_of(SimpleNamespace(sage=RequestPrediction(asked=asked), **given), tenant)  # type: ignore[arg-type]

    chat = Asked(session="of its beginning")
    names = {session(chat), session(chat, "tenant"), session(chat, lora_path="adapter")}
    assert len(names - {""}) == 3
    assert session(chat, sampling_params={"n": 1}) == session(chat)
    assert session(chat, sampling_params={"n": 2}) == ""
    assert session(Asked()) == session(None) == ""


@pytest.mark.parametrize(
    ("fields", "keeps_by_id", "session"),
    [
        ({"session_params": {"id": "a"}}, False, "a"),
        ({"session_id": "a"}, True, "a"),
        ({"session_id": "a"}, False, ""),
        ({"session_params": {"id": 7}, "session_id": None}, True, ""),
        ({}, True, ""),
    ],
)
def test_a_session_of_sglangs_is_named_as_where_it_is_closed(
    fields: dict[str, Any], keeps_by_id: bool, session: str
) -> None:
    args = SimpleNamespace(enable_session_radix_cache=keeps_by_id)
    named = _session_of(SimpleNamespace(server_args=args), GenerateReqInput(text="a", **fields))  # type: ignore[arg-type]
    assert named == (session and session_of(session))


def test_a_request_whose_prediction_is_awaited_can_be_dumped() -> None:
    # SGLang pickles requests for its dumps, and whoever reads them may not have this package.
    async def dumped() -> bytes:
        kept = RequestPrediction("Why?", prediction=asyncio.get_running_loop().create_future())
        assert copy.deepcopy([kept]) == [kept]
        return pickle.dumps(kept)

    written = asyncio.run(dumped())
    assert b"Why?" not in written
    assert b"patches" not in written
    assert pickle.loads(written) == {}


def test_of_a_long_answer_the_history_hears_at_each_doubling() -> None:
    told: list[tuple[str, int]] = []
    client = SimpleNamespace(
        goes_on=lambda handle, num_in, num_out: told.append(("goes on", num_out)),
        finished=lambda handle, num_in, num_out, *how: told.append(("finished", num_out)),
    )
    obj = SimpleNamespace(sage=RequestPrediction(handle=1), sampling_params={})
    manager: Any = SimpleNamespace(
        model_config=SimpleNamespace(hf_eos_token_id={2}),
        tokenizer=None,
        sage=SimpleNamespace(client=client, dispatch=None),
        rid_to_state={"a": SimpleNamespace(obj=obj)},
    )
    for num_tokens in [*range(1, 300), 300]:
        reason = {"type": "stop"} if len(told) == 3 and num_tokens == 300 else None
        output: Any = SimpleNamespace(
            rids=["a"], finished_reasons=[reason], prompt_tokens=[5], completion_tokens=[num_tokens]
        )
        _before_output(manager, output)
    assert told == [("goes on", 64), ("goes on", 128), ("goes on", 256), ("finished", 300)]


@pytest.mark.parametrize(
    ("reason", "cut", "stopped"),
    [
        ({"type": "stop", "matched": 2}, False, False),
        ({"type": "stop", "matched": 1}, False, False),
        ({"type": "stop", "matched": 7}, False, True),
        ({"type": "stop", "matched": "END"}, False, True),
        ({"type": "stop"}, False, False),
        ({"type": "length", "length": 9}, True, False),
        ({"type": "abort", "message": "gone"}, True, False),
    ],
)
def test_the_history_hears_who_ended_an_answer(
    reason: dict[str, Any], cut: bool, stopped: bool
) -> None:
    told: list[tuple[Any, ...]] = []
    manager: Any = SimpleNamespace(
        model_config=SimpleNamespace(hf_eos_token_id={1}),
        tokenizer=SimpleNamespace(eos_token_id=2),
        sage=SimpleNamespace(
            client=SimpleNamespace(finished=lambda *said: told.append(said)), dispatch=None
        ),
    )
    obj = SimpleNamespace(
        sage=RequestPrediction(handle=3), sampling_params={"stop_token_ids": [2, 7]}
    )
    manager.rid_to_state = {"a": SimpleNamespace(obj=obj)}
    output: Any = SimpleNamespace(
        rids=["a"], finished_reasons=[reason], prompt_tokens=[5], completion_tokens=[9]
    )
    _before_output(manager, output)
    assert told == [(3, 5, 9, cut, stopped)]


FORESEEN = LengthDistribution.from_samples([70], "history")
PRIOR = LengthDistribution.from_samples([90], "prior")


class Asking:
    """A client of the prediction worker that knows an answer, or the prior."""

    prior = PRIOR

    async def predict(self, text: str, scope: str, asked: Asked) -> Prediction:
        return Prediction(1, FORESEEN)


def carried(
    manager: Any,
    body: dict[str, Any],
    route: str = "generate",
    headers: Any = None,
    trust: str = "none",
) -> Any:
    """The custom_params that a request goes on with."""
    config = SageConfig(hints=HintsConfig(trust))
    manager.sage = SimpleNamespace(
        config=config, claims=SloClaims(config.slo), urgency=UrgencyGuess(UrgencyConfig()),
        metrics=SimpleNamespace(start=lambda: None, timed=lambda asked: asked),
        client=Asking(), predicts=True,
    )  # fmt: skip
    manager._server_stop_hook, manager.server_status = print, ServerStatus.Up
    manager.model_config = SimpleNamespace(vocab_size=100, hidden_size=1)
    manager.mm_processor = None
    manager.server_args = SimpleNamespace(enable_session_radix_cache=False)
    endpoint = SimpleNamespace(__name__=route)
    request: Any = SimpleNamespace(scope={"endpoint": endpoint}, headers=headers or {}, _json=body)

    async def come() -> Any:
        obj = GenerateReqInput(**body)
        _before_generate(manager, obj, request)
        obj.normalize_batch_and_arguments()
        _before_init_state(manager, obj, request)
        start(manager, obj)
        sampling = SimpleNamespace(max_new_tokens=128, custom_params=None)
        tokenized: Any = SimpleNamespace(input_ids=[1], mm_inputs=None, sampling_params=sampling)
        await attach(manager, obj, tokenized)
        return sampling.custom_params

    return asyncio.run(come())


@pytest.mark.parametrize(
    ("body", "route", "found"),
    [
        ({"text": "Why?"}, "generate", FORESEEN),
        # Served by arrival it would come before all that have a rank.
        ({"text": "Why?", "rid": "HEALTH_CHECK"}, "generate", FORESEEN),
        ({"input_embeds": [[1.0]]}, "generate", PRIOR),
        ({"input_ids": [0], "rid": "HEALTH_CHECK_1"}, "health_generate", None),
    ],
)
def test_only_what_the_server_asks_itself_goes_without_a_prediction(
    manager: Any, body: dict[str, Any], route: str, found: LengthDistribution | None
) -> None:
    assert decode(carried(manager, body, route)) == found


@pytest.mark.parametrize(
    ("trust", "by_header", "is_told"),
    [
        ("none", True, False), ("none", False, False), ("header", True, True),
        ("header", False, False), ("body", True, True), ("body", False, True),
    ],
)  # fmt: skip
def test_who_is_trusted_may_ask_what_was_predicted(
    manager: Any, trust: str, by_header: bool, is_told: bool
) -> None:
    sampling = {} if by_header else {"custom_params": {"explain": True}}
    headers = {"x-sage-explain": "1"} if by_header else {}
    body = {"text": "Why?", "sampling_params": sampling}
    found = carried(manager, body, headers=headers, trust=trust)
    assert (EXPLAIN.keys() <= found.keys()) is is_told
