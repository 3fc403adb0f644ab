from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.tokenizer_manager import ServerStatus

from patches import carrier
from patches.http.asked import asked_of, asked_of_chat, scope_of
from patches.http.incoming import Incoming, chat_hooks, incoming, last_user_text, prompt_text
from predictor_store.predict.asked import Asked, digest
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from tests.patches.http.conftest import EOS, PREDICTED, PRIOR, Client, Manager, generate

DRY = {"x-sage-dry-run": "1"}
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}]


def carried(manager: Manager, obj: Any = None, *args: Any, **kw: Any) -> Any:
    """Return the custom_params with which a request, or the first of several, goes on."""
    tokenized, *_ = manager.receive(generate() if obj is None else obj, *args, **kw)
    return tokenized.sampling_params.custom_params


def of_chat(messages: list[Any] = TALK, **fields: Any) -> Any:
    """Return the request that SGLang makes from a chat."""
    obj = generate("a template around it", **fields)
    chat_hooks[0].hook((obj, None), None, ChatCompletionRequest(model="any", messages=messages))
    return obj


@pytest.mark.parametrize("at_once", [False, True])
def test_a_batch_is_stripped_and_predicted_one_by_one(
    manager: Manager, client: Client, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    monkeypatch.setattr("patches.http.intake.monotonic", count(1.0).__next__)
    given = {"__sage_lengths": [1], "__sage_hint_weight": 9.0, "theirs": 1}
    sampling = {"custom_params": given, "stop_token_ids": [EOS]}
    obj = generate(["a", "b"], [sampling] * 2, rid=["one", "two"])  # type: ignore[arg-type]
    batch = manager.receive(obj, at_once=at_once)
    assert [tokenized.sampling_params.custom_params for tokenized in batch] == [
        {"theirs": 1, **carrier.encode(PREDICTED), **carrier.encode_asked(rid, 1.0, 2.0)}
        for rid in ("one", "two")
    ]
    assert client.asked == [(text, "", Asked()) for text in "ab"]
    assert [incoming(obj[number]).handle for number in range(2)] == [1, 2]
    assert "__sage_lengths" in given  # the client's own dict


def test_an_invalid_request_is_refused(manager: Manager, client: Client) -> None:
    with pytest.raises(ValueError, match="input_ids have -1"):
        manager.receive(generate(None, input_ids=[[1], [-1]]))
    assert client.asked == []  # not for the first of the batch either
    with pytest.raises(ValueError, match="max_new_tokens is"):
        manager.receive(generate(sampling={"max_new_tokens": 2.5}))


def test_samples_of_a_prompt_share_its_prediction(manager: Manager, client: Client) -> None:
    obj = generate(sampling={"n": 3})
    manager.receive(obj)
    for _ in range(3):
        sample = copy.copy(obj[0])
        sample.regenerate_rid()
        manager.receive(sample)
    assert len(client.asked) == 1


HINT = LengthDistribution.from_samples([30], "hint")


@pytest.mark.parametrize(
    ("fields", "about", "predicted"),
    [
        # In order of arrival it would precede all ranked requests.
        ({"rid": "HEALTH_CHECK"}, {}, PREDICTED),
        ({"text": None, "input_embeds": [[1.0, 1.0]]}, {}, PRIOR),
        # Only the server's own requests have no prediction.
        ({}, {"route": "health_generate"}, None),
        ({}, {"server_status": ServerStatus.Starting}, None),
        ({}, {"server_status": ServerStatus.Starting, "_server_stop_hook": None}, PREDICTED),
        ({}, {"disaggregation_mode": "prefill"}, None),
        ({}, {"disaggregation_mode": "decode"}, PREDICTED),
        # A gateway's length counts, up to the cap, if nothing better is known.
        ({"osl": 40}, {"known": None}, HINT),
        ({"osl": 40}, {"known": PRIOR}, HINT),
        ({"osl": 40}, {}, PREDICTED.capped(30)),
        ({"osl": 20}, {"known": None}, LengthDistribution.from_samples([20], "hint")),
    ],
)
def test_a_request_goes_on_with_a_prediction(
    make_manager: Callable[..., Manager], client: Client, fields: Any, about: dict[str, Any],
    predicted: LengthDistribution | None,
) -> None:  # fmt: skip
    client.distribution = about.pop("known", PREDICTED)
    route = about.pop("route", "generate_request")
    manager = make_manager(about, hints={"trust": "body"})
    vars(manager).update(about)
    assert client.is_started is ("prefill" not in about.values())
    osl = fields.pop("osl", None)
    obj = generate(sampling={"max_new_tokens": 30} if osl else None, **fields)
    vars(obj)["nvext"] = {"agent_hints": {"osl": osl} if osl else {}}
    found = carried(manager, obj, route=route)
    assert carrier.decode(found) == predicted
    assert carrier.decode_asked(found) is not None


BY_HEADER, PRIORITY_3 = Hints(ttft_slo_ms=250.0, tenant="a"), {"priority": 3}


@pytest.mark.parametrize(
    ("sections", "hints", "priority"),
    [
        ({}, Hints(), None),
        ({"hints": {"trust": "header"}}, BY_HEADER, 3),
        ({"hints": {"trust": "body"}}, replace(BY_HEADER, weight=2.0, ttft_slo_ms=100.0), 3),
        ({"slo": {"trust": "header", "classes": {"bulk": {"weight": 0.5, "urgency": 4}}}},
         Hints(weight=0.5, urgency=4, slo_class="bulk", tenant="b"), None),
        ({"hints": {"trust": "header"}, "slo": {"trust": "body"}},
         replace(BY_HEADER, urgency=1), 3),
        ({"hints": {"trust": "header"}, "slo": {"trust": "body", "classes": {"a": PRIORITY_3}}},
         replace(BY_HEADER, slo_class="a"), 3),
    ],
)  # fmt: skip
def test_hints_count_if_they_are_trusted(
    make_manager: Callable[..., Manager], sections: Any, hints: Hints, priority: int | None
) -> None:
    given = {"custom_params": {"weight": 2.0, "ttft_slo_ms": 100.0}}
    obj = generate("My father has crushing chest pain and cannot breathe!", given)
    headers = {
        "x-smg-tenant-id": "a", "x-sage-tenant": "b", "x-dynamo-request-priority": "3",
        "x-llm-d-slo-ttft-ms": "250", "x-smg-priority": "bulk",
    }  # fmt: skip
    manager = make_manager(**sections)
    assert carrier.decode_hints(carried(manager, obj, headers)) == hints
    assert obj.priority == priority


CHAT = asked_of_chat(ChatCompletionRequest(model="any", messages=TALK)).session
BY_ID, TENANT = {"enable_session_radix_cache": True}, {"x-sage-tenant": "a"}


@pytest.mark.parametrize(
    ("obj", "server_args", "headers", "session"),
    [
        # Sessions of SGLang are hinted as they are closed.
        (generate(session_params={"id": "a"}), {}, {}, carrier.session_of("a")),
        (generate(session_id="a"), BY_ID, {}, carrier.session_of("a")),
        (generate(session_params={"id": "a"}), BY_ID, {}, carrier.session_of("a")),
        (generate(session_id="a"), {}, {}, ""),
        (generate(), BY_ID, {}, ""),
        # A chat of one sample is a session.
        (of_chat(), {}, {}, digest("", "", CHAT)),
        (of_chat(sampling={"n": 1}), {}, {}, digest("", "", CHAT)),
        (of_chat(lora_path="adapter"), {}, {}, digest("", "adapter", CHAT)),
        (of_chat(), {}, TENANT, digest("a", "", CHAT)),
        (of_chat(sampling={"n": 2}), {}, {}, ""),
        (of_chat(TALK[:1]), {}, {}, ""),
        # A dry run belongs to none.
        (of_chat(), {}, DRY, ""),
        (generate(session_id="a"), BY_ID, DRY, ""),
    ],
)
def test_a_request_is_of_its_session(
    make_manager: Callable[..., Manager], client: Client, obj: Any, server_args: Any,
    headers: Any, session: str,
) -> None:  # fmt: skip
    found = carried(make_manager(server_args, slo={"trust": "header"}), obj, headers)
    part = obj if obj.is_single else obj[0]
    asked = asked_of(part, incoming(part).asked, headers.get("x-sage-tenant", ""))
    assert client.asked == [(client.asked[0][0], scope_of(part).name, asked)]
    assert (carrier.decode_hints(found).session, carrier.is_dry_run(found)) == (
        session,
        headers is DRY,
    )


def test_a_dry_run_takes_nothing(make_manager: Callable[..., Manager]) -> None:
    manager = make_manager(slo={"classes": {"all": {}}, "default": "all"})
    before = manager.sage.claims.stats()
    carried(manager, None, DRY)
    assert manager.sage.claims.stats() == before
    with pytest.raises(ValueError, match="a dry run has no session_params"):
        carried(manager, generate(session_params={"id": "a"}), DRY)


def test_the_last_user_message_counts() -> None:
    image = {"type": "image_url", "image_url": {"url": "u"}}
    for messages, text in (
        ([("user", "one"), ("assistant", "no"), ("user", "two"), ("developer", "x")], "two"),
        ([("user", [image, {"type": "text", "text": "a"}])], "a"),
        ([("system", "be brief")], None), ([], None),
    ):  # fmt: skip
        said = [{"role": role, "content": content} for role, content in messages]
        assert last_user_text(ChatCompletionRequest(model="any", messages=said).messages) == text


def test_chats_and_responses_are_asked_by_their_own_words(manager: Manager, client: Client) -> None:
    carried(manager, of_chat())

    async def respond() -> None:
        chat_hooks[1].hook(None, ChatCompletionRequest(model="any", messages=TALK))
        await manager.received(generate("a template"), None)

    asyncio.run(respond())
    assert [(text, asked.num_turns) for text, _, asked in client.asked] == [("How?", 2)] * 2


def test_token_ids_are_read_as_text(manager: Manager) -> None:
    def text(ids: Any) -> str | None:
        return prompt_text(manager, generate(None, input_ids=ids))

    assert text([5] * 1000 + [6] * 1000) == manager.tokenizer.decode([5] * 512 + [6] * 512)
    for junk in ([10**9], [2**70], [[]], ["a"], [1.5], [], [None]):
        assert isinstance(text(junk), str | None)  # nothing is raised


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
