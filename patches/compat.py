"""The supported SGLang releases, and all differences between them."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

from sage_sched.errors import UserError

# Every hook fits all of these releases. A hook that fits only some will have to name them.
SUPPORTED_RELEASES = ("0.5.22", "0.5.23")

_COMMON = "sglang.srt.mem_cache.common"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_BACKUP = ("req", "tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator", "backend")
# Unhooked functions that we call, with the parameters that we pass by name or rely on.
CALLS = (
    (f"{_COMMON}.backup_kv_cache", _BACKUP),
    (f"{_COMMON}.restore_kv_cache", _BACKUP),
    (f"{_COMMON}.discard_kv_cache_backup", ("req", "tree_cache", "backend")),
    # The last parameter was `is_insert` until 0.5.21.
    (f"{_COMMON}.release_kv_cache", ("req", "tree_cache", "checkpoint")),
    (f"{_COMMON}.evict_from_tree_cache", ("tree_cache", "num_tokens")),
    (f"{_COMMON}.match_kv_cache", ("req", "tree_cache")),
    ("sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode", ()),
    (
        "sglang.srt.disaggregation.decode.alloc_for_decode_prealloc",
        ("req", "fill_len", "delta_len", "prefix_len", "total_prefix_len", "prefix_indices",
         "uses_swa_tail", "swa_tail_len", "req_to_token_pool"),
    ),
    ("sglang.srt.disaggregation.decode.DecodePreallocQueue.resume_retracted_reqs", ()),
    (
        f"{_BATCH}.init_new",
        ("reqs", "req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache", "model_config",
         "enable_overlap", "spec_algorithm"),
    ),
    (f"{_BATCH}.prepare_for_prebuilt", ()),
    (f"{_BATCH}.process_prebuilt", ("future_map",)),
    (f"{_BATCH}.release_req", ("idx", "remaing_req_count", "offload_kv")),
    (f"{_BATCH}.filter_batch", ("keep_indices",)),
    (f"{_BATCH}.merge_batch", ("other",)),
    (f"{_BATCH}.new_tokens_required_next_decode", ()),
    ("sglang.srt.managers.scheduler.NextBatchPlan", ("batch_to_run", "running_batch")),
    ("sglang.srt.managers.load_snapshot.ShmLoadSnapshotReader.read_all", ()),
    ("sglang.srt.managers.scheduler.Scheduler._reqs_finishing_inflight", ("batch",)),
    ("sglang.srt.managers.scheduler.Scheduler.abort_request", ("recv_req",)),
    (
        "sglang.srt.managers.scheduler.Scheduler.can_schedule_lora_req",
        ("req", "running_loras"),
    ),
    ("sglang.srt.lora.lora_manager.LoRAManager.validate_lora_batch", ("lora_ids",)),
)  # fmt: skip

# SGLang loads no plugin in the HTTP processes of --tokenizer-worker-num, but serves the app that
# this variable names. Our app installs the hooks.
APP_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
APP = "sage_sched.entry_points:app"


class UnsupportedServerError(UserError, RuntimeError):
    """This SGLang, or the way it was started, is not supported. The message says how to fix it."""


def serves_named_app() -> bool:
    """Whether several HTTP processes can serve the app that APP_VARIABLE names (SGLang since
    0.5.23)."""
    from sglang.srt.environ import envs

    return hasattr(envs, APP_VARIABLE)


def has_other_app() -> bool:
    """Whether that variable names another app, which would not have our hooks."""
    return os.environ.get(APP_VARIABLE, APP) != APP


@contextlib.contextmanager
def passing_for_fcfs(server_args: Any) -> Iterator[None]:
    """Let SGLang's check of its arguments see the policy `fcfs` within this context.

    With --enable-priority-scheduling, SGLang accepts only `fcfs` and `lof`. Before 0.5.23 this does
    nothing, and SGLang refuses the flag under our policies.
    """
    declared = getattr(server_args, "_resolved_overrides", None)
    if declared is None or not server_args.enable_priority_scheduling:
        yield
        return
    ours = ("sage-sched", {"schedule_policy": "fcfs"})
    declared.append(ours)
    try:
        yield
    finally:
        declared.remove(ours)


def contract_error(fields: dict[str, Any]) -> str | None:
    """Return SGLang's objection to the fields of a request at /generate, or None. SGLang has
    checked these fields since 0.5.23."""
    with contextlib.suppress(ImportError):
        place = importlib.import_module("sglang.srt.entrypoints.api_contract")
        said: str | None = place.generate_contract_error(fields)
        return said
    return None


def thinking_of(chat: object) -> object:
    """Return `thinking` of a ChatCompletionRequest; None before 0.5.23, which added the field."""
    return getattr(chat, "thinking", None)


def _release() -> str:
    # Imported here, because `sage-sched doctor` reads this module even if SGLang cannot be
    # imported.
    import sglang.version

    return str(sglang.version.__version__)


def check_release() -> None:
    """Raises UnsupportedServerError unless the installed SGLang is a supported release."""
    if (release := _release()) not in SUPPORTED_RELEASES:
        raise UnsupportedServerError(
            f"SGLang {release} is installed, supported: {', '.join(SUPPORTED_RELEASES)}. "
            "Install a supported release, or choose one of SGLang's own policies."
        )
