"""Our flags of a server, and which flags a server is given."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

# Each names a file.
FLAGS = {
    "--sage-config": "TOML or YAML file with the settings of sage-sched (default: the defaults, or "
    "the file that the environment variable SAGE_CONFIG names).",
    "--sage-trace": "where to write what happens to each request and why, as JSON lines (default: "
    "the file that the environment variable SAGE_TRACE names, or nowhere).",
    "--sage-shadow": "Under one of SGLang's own policies: predict, write down what was predicted "
    "and what came, and change nothing. `sage-sched whatif` reads the file; it holds no prompts.",
}


def named(argv: Sequence[str]) -> dict[str, Any]:
    """The flags that are given, with their texts, under SGLang's names for them (`tp_size`): by
    their other names, abbreviated, or in the file of --config too.

    SGLang's own parser finds them, so that we resolve what it will. Without SGLang only our own
    flags are known. Raises ValueError and OSError if the file of --config cannot be read.
    """
    parser = argparse.ArgumentParser(prog="sglang serve", add_help=False)
    with contextlib.suppress(ImportError):
        importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    for flag in FLAGS:
        if flag not in parser._option_string_actions:  # they are there once the plugin is loaded
            parser.add_argument(flag)
    if "--config" in argv and "--config" in parser._option_string_actions:
        argv = _merged(parser, argv)
    for action in parser._actions:
        # What is wrong with a value is for SGLang to say.
        action.default, action.required = argparse.SUPPRESS, False
        action.choices = action.type = None
    return vars(parser.parse_known_args(argv)[0])


def _merged(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """As SGLang merges them (prepare_server_args)."""
    import yaml

    place = importlib.import_module("sglang.srt.utils.server_args_config_parser")
    try:
        return list(place.ConfigArgumentMerger(parser).merge_config_with_args([*argv]))
    except (yaml.YAMLError, AttributeError, RecursionError) as error:  # a key that is no text
        raise ValueError(f"--config: {error}") from error
