"""Refuses the ways to run SGLang that the plugin does not support, each with the reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from patches.compat import UnsupportedServerError, has_other_app, serves_named_app

_NO_HOOKS = "no plugin is loaded in its processes"
_NO_ANSWERS = "it gives no answers whose length could be predicted"
_UNTRIED = "it has not been tried with sage-sched"

# The features that are refused under a policy of ours, each with the reason.
REFUSED = {
    "SGLANG_RUST_SERVER": "its front end is not Python, so no prompt can be read",
    "SGLANG_HTTP_SERVER_APP_PATH and --tokenizer-worker-num above 1": _NO_HOOKS,
    "--tokenizer-worker-num above 1 on SGLang 0.5.22": _NO_HOOKS,
    "--use-ray": _NO_HOOKS,
    "--smg-grpc-mode": _NO_HOOKS,
    "--skip-tokenizer-init": "prompts cannot be read",
    "--pp-size above 1": "its scheduler keeps a running batch per stage",
    "--enable-pd-role-switch": "order and prediction depend on the role at the start",
    "--encoder-only": _NO_ANSWERS,
    "--is-embedding": _NO_ANSWERS,
    "--dllm-algorithm": _UNTRIED,
    "--enable-pdmux": _UNTRIED,
}
# --sage-shadow only observes. It refuses only servers on which it could not see requests.
REFUSED_WITH_SHADOW = dict.fromkeys((
    "SGLANG_RUST_SERVER", "--use-ray", "--smg-grpc-mode", "--skip-tokenizer-init", "--encoder-only",
    "--is-embedding", "--dllm-algorithm", "--tokenizer-worker-num above 1",
    "--disaggregation-mode",
), "it sees no prompts there, or no answers")  # fmt: skip

# Conditions of the entries that "--flag" or "--flag above N" does not express.
_SPECIAL: Mapping[str, Callable[[Any], bool]] = {
    "SGLANG_RUST_SERVER": lambda args: (
        os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y")
    ),
    "SGLANG_HTTP_SERVER_APP_PATH and --tokenizer-worker-num above 1": lambda args: (
        args.tokenizer_worker_num > 1 and has_other_app()
    ),
    "--tokenizer-worker-num above 1 on SGLang 0.5.22": lambda args: (
        args.tokenizer_worker_num > 1 and not serves_named_app()
    ),
    "--smg-grpc-mode": lambda args: args.smg_grpc_mode or args.grpc_mode,
    "--disaggregation-mode": lambda args: args.disaggregation_mode != "null",
}


def _is_asked_for(server_args: Any, what: str) -> bool:
    """Whether the server has a refused feature. what: a key of _SPECIAL, "--flag", or "--flag above
    N"."""
    if what in _SPECIAL:
        return _SPECIAL[what](server_args)
    flag, _, most = what.partition(" above ")
    value = getattr(server_args, flag.removeprefix("--").replace("-", "_"))
    return bool(value > int(most) if most else value)


def refuse(server_args: Any, ours: str, reasons: Mapping[str, str]) -> None:
    """Raise UnsupportedServerError, which names all of these features that the server has. ours:
    our feature, which does not work with them."""
    found = [
        f"{what}: {reason}" for what, reason in reasons.items() if _is_asked_for(server_args, what)
    ]
    if found:
        leave = "Leave one of them out" if len(found) == 1 else "Leave it, or all of them, out"
        raise UnsupportedServerError(
            f"{ours} does not work with {'; nor with '.join(found)}. {leave}."
        )


def refuse_place(flag: str, path: str) -> None:
    """Raise UnsupportedServerError if no file can be written at this path. Creates nothing."""
    file = Path(path).absolute()
    is_taken = os.path.lexists(file) and (
        file.is_symlink() or not file.is_file() or not os.access(file, os.W_OK)
    )
    if is_taken or not os.access(file.parent, os.W_OK | os.X_OK):
        raise UnsupportedServerError(
            f"{flag} is {path}, allowed: a file in a folder that can be written to"
        )


def refuse_model(model_config: Any) -> None:
    """Raise UnsupportedServerError for a model that does not generate, under any flags."""
    if not model_config.is_generation:
        raise UnsupportedServerError(
            f"{model_config.model_path} does not generate: {_NO_ANSWERS}. "
            "Choose one of SGLang's own policies for it."
        )
