"""Makes the JSON schema of the configuration file. The settings page and all help texts are made
from it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_origin

import msgspec

from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names, policy_type, section_of
from sage_sched.fields import hints_of, section_in


def json_schema(policies: Iterable[str] = ()) -> dict[str, Any]:
    """Return the JSON schema of a configuration file, for editors and validators.

    policies: the policies whose sections it describes; if empty, all that can be loaded.
    """
    schema = _section(SageConfig)
    names = {*policies} or {section for name in policy_names() if (section := _section_name(name))}
    sections = {name: _section(policy_type(name).Parameters) for name in sorted(names)}
    schema["properties"]["policy"] = _object(sections)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted name and the schema of each setting."""
    for name, node in schema["properties"].items():
        by_name = node.get("additionalProperties")
        if by_name:
            yield from leaves(by_name, f"{path}{name}.NAME.")
        elif "properties" in node:
            yield from leaves(node, f"{path}{name}.")
        else:
            yield f"{path}{name}", node


def default_of(leaf: Mapping[str, Any]) -> str:
    """Return a setting's default as it is written in TOML. A schema without a default means
    infinity, which JSON cannot express."""
    return json.dumps(leaf["default"]) if "default" in leaf else "inf"


def _section_name(policy: str) -> str:
    try:
        return section_of(policy)
    except ValueError:  # a package offers it, but it cannot be loaded
        return ""


def _section(of: type[Any]) -> dict[str, Any]:
    hints, texts = hints_of(of), _texts(of)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(of):
        hint = hints[field.name]
        section = section_in(hint)
        if section is None:
            value = {**msgspec.json.schema(hint), "description": texts.get(field.name, "")}
            if field.default not in (dataclasses.MISSING, math.inf):
                value["default"] = field.default
        else:
            value = _section(section)
            if get_origin(hint) is Mapping:
                value = {"type": "object", "additionalProperties": value}
        properties[field.name] = value
    return _object(properties) | {"description": _words((of.__doc__ or "").split("\n\n")[0])}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _texts(of: type[Any]) -> dict[str, str]:
    """Return the text below each field in a class or its bases, by name."""
    texts = dict[str, str]()
    for each in reversed(of.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = _words(text)
    return texts


def _words(text: str) -> str:
    return " ".join(text.split())
