"""YAML in and out: safe types only, duplicate keys refused, `1e-3` is a number (YAML 1.2, not 1.1)."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from sparsebit.errors import ConfigError

# PyYAML follows YAML 1.1, where a float needs a dot: `ALPHA: 1e-3` would be text
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *other`
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # PyYAML reports the problem itself
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # `&id001` is noise in a config file


for _cls in (_Loader, _Dumper):  # the dumper too, so that the text '1e-3' is written with quotes
    _cls.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file; every failure is a ConfigError that names the file."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_problem(error)}") from None
    if data is None:
        raise ConfigError(f"{path}: the file is empty; write at least one option, such as BACKEND: virtual")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected options (KEY: value), got a {type(data).__name__}")
    return data


def write_yaml(data: Mapping[str, Any], **options: Any) -> str:
    """`options` are those of `yaml.dump`."""
    text: str = yaml.dump(dict(data), Dumper=_Dumper, **{"sort_keys": False, **options})
    return text


def _problem(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"not valid YAML: {error}"
    mark = error.problem_mark
    what = error.problem or "cannot be parsed"
    kind = "not valid YAML: "
    if isinstance(error, yaml.constructor.ConstructorError):
        kind = ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {kind}{what}"
