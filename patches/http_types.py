"""What we read of SGLang's objects in the HTTP process (SGLang 0.5.23)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol


class ServerArgs(Protocol):
    """srt/server_args.py"""

    _sage_config: Any  # SageConfig
    _sage_shadow: str
    schedule_policy: str
    served_model_name: str | None
    model_path: str
    dp_size: int
    tokenizer_worker_num: int


class Request(Protocol):
    """GenerateReqInput, managers/io_struct.py. What a client has not been checked for is object."""

    sage: Any  # patches.http.predict.RequestPrediction
    rid: object
    text: object
    input_ids: Any
    lora_path: object
    session_params: object
    session_id: object
    conversation_id: object
    sampling_params: Any
    batch_size: int
    priority: object
    routed_dp_rank: int | None

    def __getitem__(self, i: int) -> Request: ...
    def contains_mm_input(self) -> bool: ...


class TokenizedRequest(Protocol):
    """TokenizedGenerateReqInput, managers/io_struct.py"""

    rid: str
    sampling_params: Any  # SamplingParams, whose max_new_tokens may be None still
    input_ids: Any
    mm_inputs: object
    lora_id: str | None
    extra_key: str | None
    cache_salt: str | None
    routed_dp_rank: int | None


class ReqState(Protocol):
    """managers/tokenizer_manager.py"""

    obj: Request
    dispatched: bool


class BatchOutput(Protocol):
    """BatchStrOutput and its like, managers/io_struct.py: of each request the same place."""

    rids: Sequence[str]
    finished_reasons: Sequence[Mapping[str, Any] | None]
    prompt_tokens: Sequence[int]
    completion_tokens: Sequence[int]


class TokenizerManager(Protocol):
    """managers/tokenizer_manager.py"""

    sage: Any  # patches.http.state.HttpState, or patches.ops.shadow.Shadow
    enable_metrics: bool
    metrics_collector: Any
    load_snapshot_reader: Any
    server_args: ServerArgs
    server_status: object
    rid_to_state: MutableMapping[str, ReqState]
    tokenizer: Any
    model_config: Any
    _server_stop_hook: object | None
    _result_dispatcher: Any

    def abort_request(self, rid: str) -> None: ...
    def _handle_abort_req(self, recv_obj: Any) -> None: ...
    def auto_create_handle_loop(self) -> None: ...
    def _dispatch_to_scheduler(self, obj: Any) -> None: ...


# A method of theirs that is awaited; it takes what they please.
Awaited = Callable[..., Awaitable[Any]]
