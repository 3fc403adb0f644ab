"""The ways to run SGLang that the plugin cannot serve, each with the reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patches.compat import UnsupportedServerError, has_other_app, serves_named_app
from sage_sched.config import SageConfig

_NO_HOOKS = "no plugin is loaded in its processes"
_NO_ANSWERS = "it gives no answers whose length could be predicted"
_UNTRIED = "it has not been tried with sage-sched"

# What it is called, whether the server's arguments ask for it, why not.
_REFUSALS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "SGLANG_RUST_SERVER",
        lambda args: os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"),
        "its front end is not Python, so no prompt can be read",
    ),
    (
        "SGLANG_HTTP_SERVER_APP_PATH and --tokenizer-worker-num above 1",
        lambda args: args.tokenizer_worker_num > 1 and has_other_app(),
        _NO_HOOKS,
    ),
    (
        "--tokenizer-worker-num above 1 on SGLang 0.5.22",
        lambda args: args.tokenizer_worker_num > 1 and not serves_named_app(),
        _NO_HOOKS,
    ),
    ("--use-ray", lambda args: args.use_ray, _NO_HOOKS),
    ("--smg-grpc-mode", lambda args: args.smg_grpc_mode or args.grpc_mode, _NO_HOOKS),
    ("--skip-tokenizer-init", lambda args: args.skip_tokenizer_init, "prompts cannot be read"),
    (
        "--pp-size above 1",
        lambda args: args.pp_size > 1,
        "its scheduler keeps a running batch per stage",
    ),
    ("--disaggregation-mode", lambda args: args.disaggregation_mode != "null", _UNTRIED),
    ("--encoder-only", lambda args: args.encoder_only, _NO_ANSWERS),
    ("--is-embedding", lambda args: args.is_embedding, _NO_ANSWERS),
    ("--dllm-algorithm", lambda args: args.dllm_algorithm is not None, _UNTRIED),
    ("--enable-pdmux", lambda args: args.enable_pdmux, _UNTRIED),
    (
        "--abort-on-priority-when-disabled",
        lambda args: args.abort_on_priority_when_disabled,
        "a request's priority may say of which class it is",
    ),
    (
        "--enable-priority-scheduling",
        lambda args: args.enable_priority_scheduling,
        "priorities and predicted cost are two orders of one queue; classes of requests "
        "([slo.classes.NAME] of --sage-config) under --schedule-policy proserve take its place",
    ),
)


def refuse_unsupported(server_args: Any) -> None:
    """Raises UnsupportedServerError if the server is asked for something named above."""
    for name, asked_for, reason in _REFUSALS:
        if asked_for(server_args):
            raise UnsupportedServerError(
                f"--schedule-policy {server_args.schedule_policy} does not work with {name}: "
                f"{reason}. Leave one of them out."
            )


def refuse_trace(path: str | None) -> None:
    """Raises UnsupportedServerError if a trace cannot be written there."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if not os.access(folder, os.W_OK) or (os.path.lexists(path) and not os.path.isfile(path)):
        raise UnsupportedServerError(
            f"--sage-trace is {path!r}, allowed: a file in a folder that can be written to"
        )


# What prefills that are cut between layers (patches/scheduler/slices.py) ask for, and what they do
# not survive, or have not been tried with.
_NEEDED_FOR_SLICES: dict[str, Callable[[Any], bool]] = {
    "--disable-overlap-schedule": lambda args: bool(args.disable_overlap_schedule),
    "--chunked-prefill-size -1": lambda args: args.chunked_prefill_size == -1,
}
_REFUSED_WITH_SLICES: dict[str, Callable[[Any], bool]] = {
    "--tp-size above 1": lambda args: args.tp_size > 1,
    "--pp-size above 1": lambda args: args.pp_size > 1,
    "--enable-dp-attention": lambda args: bool(args.enable_dp_attention),
    "--speculative-algorithm": lambda args: args.speculative_algorithm is not None,
    "--enable-lora": lambda args: bool(args.enable_lora or args.lora_paths),
    "--enable-mixed-chunk": lambda args: bool(args.enable_mixed_chunk),
    "--enable-two-batch-overlap": lambda args: bool(args.enable_two_batch_overlap),
    "--enable-hierarchical-cache": lambda args: bool(args.enable_hierarchical_cache),
}


def refuse_slices(server_args: Any, config: SageConfig) -> None:
    """Before SGLang starts its processes: raises UnsupportedServerError if prefills are to be cut
    on a server that cannot."""
    parameters = config.policy.get("qllm")
    if server_args.schedule_policy != "qllm" or parameters is None or not parameters.slice_ms:
        return
    for flag, is_there in _NEEDED_FOR_SLICES.items():
        if not is_there(server_args):
            raise UnsupportedServerError(f"policy.qllm.slice_ms needs {flag}. Add it, or set it 0.")
    for flag, is_there in _REFUSED_WITH_SLICES.items():
        if is_there(server_args):
            raise UnsupportedServerError(
                f"policy.qllm.slice_ms does not work with {flag}: it has not been tried. Leave one "
                "of them out."
            )


# Of these, what --sage-shadow, which only looks on, cannot do either.
_BLIND = (
    "SGLANG_RUST_SERVER", "--use-ray", "--smg-grpc-mode", "--skip-tokenizer-init", "--encoder-only",
    "--is-embedding", "--dllm-algorithm",
)  # fmt: skip


def refuse_shadow(server_args: Any) -> None:
    """Raises UnsupportedServerError if the server is one that --sage-shadow cannot see into."""
    found = [name for name, asked_for, _ in _REFUSALS if name in _BLIND and asked_for(server_args)]
    if server_args.tokenizer_worker_num > 1:
        found.append("--tokenizer-worker-num above 1")
    if found:
        raise UnsupportedServerError(
            f"--sage-shadow does not work with {found[0]}: it sees no prompts there, or no "
            "answers. Leave one of them out."
        )


def refuse_dispatch(server_args: Any, config: SageConfig) -> None:
    """Raises UnsupportedServerError if the router would not see all requests that it places."""
    if not config.router.dispatch:
        return
    for flag, is_there, reason in (
        (
            "--enable-dp-attention",
            server_args.enable_dp_attention,
            "its replicas take every step together",
        ),
        (
            "--tokenizer-worker-num above 1",
            server_args.tokenizer_worker_num > 1,
            "each HTTP process knows of its own requests alone",
        ),
    ):
        if is_there:
            raise UnsupportedServerError(
                f"router.dispatch = {config.router.dispatch!r} does not work with {flag}: {reason}."
            )


def refuse_model(model_config: Any) -> None:
    """Raises UnsupportedServerError for a model that does not generate, whatever the flags say."""
    if not model_config.is_generation:
        raise UnsupportedServerError(
            f"{model_config.model_path} does not generate: {_NO_ANSWERS}. "
            "Choose one of SGLang's own policies for it."
        )
