"""Reading --sage-config."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from sage_sched.config import SageConfig
from sage_sched.fields import ConfigError


def read_config(path: str | None) -> SageConfig:
    """The configuration in a TOML or YAML file (by its ending), or the defaults for None.

    Raises ConfigError, which names the file.
    """
    if path is None:
        return SageConfig()
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            sections = _read(tomllib.loads, "TOML", text)
        elif file.suffix in (".yaml", ".yml"):
            sections = _read(yaml.safe_load, "YAML", text) or {}
        else:
            raise ConfigError("its ending is not .toml, .yaml or .yml")
        if not isinstance(sections, dict):
            raise ConfigError("it does not hold sections")
        return SageConfig.parse(sections)
    except (OSError, UnicodeError, ConfigError) as error:
        raise ConfigError(f"--sage-config {file}: {error}") from error


def _read(parse: Callable[[str], Any], form: str, text: str) -> Any:
    try:
        return parse(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError) as error:
        # It says which line. YAML's message has several lines.
        raise ConfigError(f"it is not {form}: {' '.join(str(error).split())}") from error
