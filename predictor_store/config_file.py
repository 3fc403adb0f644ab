"""Reads the configuration file that --sage-config names."""

from __future__ import annotations

import tomllib
from typing import Any

import yaml

from predictor_store.cached_file import expanded
from sage_sched.app.config import SageConfig
from sage_sched.fields import ConfigError


def read_config(path: str | None) -> SageConfig:
    """Return the configuration in a TOML or YAML file (by its ending), or the defaults for None.

    Raises ConfigError, which names the file.
    """
    if path is None:
        return SageConfig()
    try:
        file = expanded(path)
        text = file.read_text(encoding="utf-8")
        if file.suffix not in (".toml", ".yaml", ".yml"):
            raise ConfigError("its ending is not .toml, .yaml or .yml")
        sections = _sections(text, "TOML" if file.suffix == ".toml" else "YAML")
        if not isinstance(sections, dict):
            raise ConfigError("it has no sections")
        return SageConfig.parse(sections)
    except (OSError, UnicodeError, ConfigError) as error:
        raise ConfigError(f"--sage-config {path}: {error}") from error


def _sections(text: str, form: str) -> Any:
    try:
        return tomllib.loads(text) if form == "TOML" else yaml.safe_load(text) or {}
    except Exception as error:  # PyYAML raises any error of Python for dates, numbers and tags
        # The error names the line. YAML's message has several lines, which are joined.
        raise ConfigError(f"it is not {form}: {' '.join(str(error).split())}") from error
