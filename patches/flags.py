"""Our server flags, and a parser for all flags of a server."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

# Each flag takes a file name.
FLAGS = {
    "--sage-config": "TOML or YAML file with the settings of sage-sched (default: the defaults, or "
    "the file that the environment variable SAGE_CONFIG names).",
    "--sage-trace": "where to write what happens to each request and why, as JSON lines (default: "
    "the file that the environment variable SAGE_TRACE names, or nowhere).",
    "--sage-shadow": "Under one of SGLang's own policies: predict lengths, write predicted and "
    "real lengths to this file, and change nothing else. The file is for `sage-sched whatif`, and "
    "holds no prompts.",
}


def named(argv: Sequence[str]) -> dict[str, Any]:
    """Return the flags in argv by SGLang's names for them (`tp_size`), with unparsed values.

    This includes abbreviated flags, other names of flags, and flags in the --config file. SGLang's
    own parser finds them, so a server will resolve them in the same way. Without SGLang only our
    own flags are known. Raises ValueError and OSError if the --config file cannot be read.
    """
    parser = argparse.ArgumentParser(prog="sglang serve", add_help=False)
    with contextlib.suppress(ImportError):
        importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    for flag in FLAGS:
        if flag not in parser._option_string_actions:  # the plugin may have added them already
            parser.add_argument(flag)
    if "--config" in argv and "--config" in parser._option_string_actions:
        argv = _merged(parser, argv)
    for action in parser._actions:
        # SGLang reports invalid values.
        action.default, action.required = argparse.SUPPRESS, False
        action.choices = action.type = None
    return vars(parser.parse_known_args(argv)[0])


def _merged(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Merge the --config file into argv as SGLang does (prepare_server_args)."""
    import yaml

    place = importlib.import_module("sglang.srt.utils.server_args_config_parser")
    try:
        return list(place.ConfigArgumentMerger(parser).merge_config_with_args([*argv]))
    except (yaml.YAMLError, AttributeError, RecursionError) as error:  # e.g. a key is not a string
        raise ValueError(f"--config: {error}") from error
