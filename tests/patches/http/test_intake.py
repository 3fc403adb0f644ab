"""Requests come in: strip, validate, hint, predict, encode."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from patches.carrier import decode, decode_asked, decode_hints, session_of
from patches.http.incoming import Incoming, chat_hooks, last_user_text, prompt_text
from predictor_store.predict.asked import Asked
from sage_sched.distribution import LengthDistribution
from tests.patches.http.conftest import PREDICTED, PRIOR, Client, Manager, generate, http_hook

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}]


def carried(manager: Manager, obj: Any = None, *args: Any, **kw: Any) -> Any:
    """The custom_params with which a request goes on."""
    (tokenized,) = manager.receive(generate() if obj is None else obj, *args, **kw)
    return tokenized.sampling_params.custom_params


def hints(*args: Any, **kw: Any) -> Any:
    return decode_hints(carried(*args, **kw))


def of_chat(messages: list[Any], **fields: Any) -> Any:
    """The request that SGLang makes from a chat."""
    chat = ChatCompletionRequest(model="any", messages=messages)
    obj = generate("a template around it", **fields)
    chat_hooks[0].hook((obj, None), None, chat)
    return obj


def test_reserved_keys_are_stripped_and_others_go_on(manager: Manager) -> None:
    given = {"__sage_lengths": [1], "__sage_hint_weight": 9.0, "theirs": 1}
    found = carried(manager, generate(sampling={"custom_params": given}))
    assert decode(found) == PREDICTED
    assert decode_hints(found).weight == 1.0
    assert found["theirs"] == 1
    assert "__sage_lengths" in given  # the client's own dict


def test_a_batch_is_stripped_and_predicted_one_by_one(manager: Manager, client: Client) -> None:
    shared = {"custom_params": {"__sage_weights": "x", "theirs": 1}}
    batch = manager.receive(generate(["a", "b"], [shared, shared], rid=["one", "two"]))  # type: ignore[arg-type]
    assert [text for text, *_ in client.asked] == ["a", "b"]
    for tokenized, rid in zip(batch, ("one", "two"), strict=True):
        found = tokenized.sampling_params.custom_params
        assert decode(found) == PREDICTED
        assert decode_asked(found)[0] == rid  # type: ignore[index]
        assert found["theirs"] == 1


def test_an_invalid_prompt_of_a_batch_costs_no_prediction(manager: Manager, client: Client) -> None:
    with pytest.raises(ValueError, match="input_ids have -1"):
        manager.receive(generate(None, input_ids=[[1], [-1]]))
    assert client.asked == []


def test_samples_of_a_prompt_share_its_prediction(manager: Manager, client: Client) -> None:
    obj = generate(sampling={"n": 3})
    manager.receive(obj)
    for _ in range(3):
        sample = copy.copy(obj[0])
        sample.regenerate_rid()
        http_hook("_init_req_state")(manager, sample)
    assert len(client.asked) == 1


@pytest.mark.parametrize(
    ("fields", "route", "predicted"),
    [
        ({}, "generate_request", PREDICTED),
        # Served by arrival it would come before all that have a rank.
        ({"rid": "HEALTH_CHECK"}, "generate_request", PREDICTED),
        ({"text": None, "input_embeds": [[1.0, 1.0]]}, "generate_request", PRIOR),
        ({"text": None, "input_ids": [0]}, "health_generate", None),
    ],
)
def test_only_the_servers_own_requests_go_without_a_prediction(
    manager: Manager, fields: Any, route: str, predicted: LengthDistribution | None
) -> None:
    assert decode(carried(manager, generate(**fields), route=route)) == predicted


def test_a_prefill_server_predicts_nothing(manager: Manager) -> None:
    manager.sage.predicts = False
    found = carried(manager)
    assert decode(found) is None
    assert decode_asked(found) is not None


@pytest.mark.parametrize(
    ("known", "source", "lengths"),
    [
        (None, "hint", 30), (PRIOR, "hint", 30),
        (LengthDistribution.from_samples([9, 11], "history"), "history", 11),
    ],
)  # fmt: skip
def test_a_gateways_length_counts_if_nothing_better_is_known(
    make_manager: Callable[..., Manager], client: Client, known: Any, source: str, lengths: int
) -> None:
    client.distribution = known
    obj = generate(sampling={"max_new_tokens": 30})
    vars(obj)["nvext"] = {"agent_hints": {"osl": 40}}
    found = decode(carried(make_manager(hints={"trust": "body"}), obj))
    assert found is not None
    assert (found.source, found.lengths[-1]) == (source, lengths)  # never above its cap


@pytest.mark.parametrize(("trust", "weight", "tenant"), [("none", 1.0, ""), ("body", 2.0, "a")])
def test_hints_count_if_they_are_trusted(
    make_manager: Callable[..., Manager], trust: str, weight: float, tenant: str
) -> None:
    found = hints(
        make_manager(hints={"trust": trust}),
        generate(sampling={"custom_params": {"weight": 2.0}}),
        {"x-smg-tenant-id": "a", "x-dynamo-request-priority": "3"},
    )
    assert (found.weight, found.tenant) == (weight, tenant)


@pytest.mark.parametrize(
    ("fields", "keeps_by_id", "session"),
    [
        ({"session_params": {"id": "a"}}, False, "a"),
        ({"session_id": "a"}, True, "a"),
        ({"session_id": "a"}, False, ""),
        ({}, True, ""),
    ],
)
def test_sessions_of_sglang_are_hinted_as_they_are_closed(
    manager: Manager, fields: dict[str, Any], keeps_by_id: bool, session: str
) -> None:
    manager.server_args.enable_session_radix_cache = keeps_by_id
    assert hints(manager, generate(**fields)).session == (session and session_of(session))


def test_a_chat_of_one_sample_is_a_session(make_manager: Callable[..., Manager]) -> None:
    manager = make_manager()

    def session(messages: list[Any] = TALK, **fields: Any) -> str:
        (first, *_) = manager.receive(of_chat(messages, **fields))
        found: str = decode_hints(first.sampling_params.custom_params).session
        return found

    assert session()
    assert session() == session(sampling={"n": 1})
    assert session(lora_path="adapter") not in ("", session())
    assert session(sampling={"n": 2}) == ""
    assert session(TALK[:1]) == ""


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([("user", "one"), ("assistant", "no"), ("user", "two"), ("tool", "x")], "two"),
        ([("system", "be brief")], None),
        ([], None),
        ([("user", [{"type": "image_url"}, {"type": "text", "text": "a"}])], "a"),
    ],
)
def test_the_last_user_message_counts(messages: list[tuple[str, Any]], text: str | None) -> None:
    def part(content: Any) -> Any:
        return (
            [SimpleNamespace(**each) for each in content] if isinstance(content, list) else content
        )

    said = [SimpleNamespace(role=role, content=part(content)) for role, content in messages]
    assert last_user_text(said) == text


def test_chats_and_responses_are_asked_by_their_own_words(manager: Manager, client: Client) -> None:
    carried(manager, of_chat(TALK))

    async def respond() -> None:
        chat_hooks[1].hook(None, ChatCompletionRequest(model="any", messages=TALK))
        await manager._receive(generate("a template"), None)

    asyncio.run(respond())
    assert [(text, asked.num_turns) for text, _, asked in client.asked] == [("How?", 2)] * 2


@pytest.mark.parametrize("ids", [[10**9], [2**70], [[]], ["a"], [1.5], [], [None], [5] * 2000])
def test_no_token_ids_raise_while_their_text_is_looked_up(manager: Manager, ids: Any) -> None:
    text = prompt_text(manager, generate(None, input_ids=ids))  # type: ignore[arg-type]
    assert text is None or isinstance(text, str)


def test_a_request_whose_prediction_is_awaited_can_be_dumped() -> None:
    # SGLang pickles requests for its dumps, and their readers may not have this package.
    async def dumped() -> bytes:
        kept = Incoming("Why?", prediction=asyncio.get_running_loop().create_future())
        assert copy.deepcopy([kept]) == [kept]
        return pickle.dumps(kept)

    written = asyncio.run(dumped())
    assert b"Why?" not in written
    assert b"patches" not in written
    assert pickle.loads(written) == {}


def test_the_predictor_is_asked_by_tenant(make_manager: Callable[..., Manager]) -> None:
    manager = make_manager(slo={"trust": "header"})
    sessions = {hints(manager, of_chat(TALK), {"x-sage-tenant": name}).session for name in "ab"}
    assert len(sessions) == 2
    assert isinstance(manager.sage.client.asked[0][2], Asked)
