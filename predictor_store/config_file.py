"""Reading --sage-config."""

from __future__ import annotations

import tomllib
from pathlib import Path

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
            sections = tomllib.loads(text)
        elif file.suffix in (".yaml", ".yml"):
            sections = yaml.safe_load(text) or {}
        else:
            raise ConfigError("its ending is not .toml, .yaml or .yml")
        if not isinstance(sections, dict):
            raise ConfigError("it does not hold sections")
        return SageConfig.parse(sections)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError) as error:
        # It says which line. YAML's message has several lines.
        form = "TOML" if file.suffix == ".toml" else "YAML"
        why = f"it is not {form}: {' '.join(str(error).split())}"
        raise ConfigError(f"--sage-config {file}: {why}") from error
    except (OSError, UnicodeError, ConfigError) as error:
        raise ConfigError(f"--sage-config {file}: {error}") from error
