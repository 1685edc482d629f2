"""SPECIFIC: overrides per layer, `[{"*head": ["QUANTIZER.BIT", 8]}]`.

Patterns (fnmatch) match the fx name or the module path of a layer. All dicts of the list count, in order;
where two patterns match the same layer the later one wins.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema

from sparsebit.config.messages import show
from sparsebit.config.values import is_text, literal
from sparsebit.errors import ConfigError

_OVERRIDES = {"type": "object", "additionalProperties": {"type": ["array", "object"]}}
_SCHEMA = {"anyOf": [{"type": "array", "items": _OVERRIDES}, _OVERRIDES]}


def normalise(value: Any, info: ValidationInfo) -> list[dict[str, list[Any]]]:
    """Turn any accepted form into a list of {pattern: [KEY, value, ...]} with upper-case keys."""
    read = literal if is_text(info) else _unchanged
    if value is None:
        rules = []
    elif hasattr(value, "items"):
        rules = [value]
    else:
        rules = value
    if not isinstance(rules, (list, tuple)) or not all(hasattr(rule, "items") for rule in rules):
        raise ConfigError(f"expected a list of {{pattern: [KEY, value, ...]}}, got {show(value)}")
    found: list[dict[str, list[Any]]] = []
    for i, rule in enumerate(rules):
        found.append(
            {str(pattern): _pairs(pairs, f"[{i}][{str(pattern)!r}]", read) for pattern, pairs in rule.items()}
        )
    return found


Overrides = Annotated[list[dict[str, list[Any]]], BeforeValidator(normalise), WithJsonSchema(_SCHEMA)]


def _unchanged(value: Any) -> Any:
    return value


def _pairs(pairs: Any, where: str, read: Callable[[Any], Any]) -> list[Any]:
    if hasattr(pairs, "items"):
        pairs = list(flat(pairs))
    if not isinstance(pairs, (list, tuple)) or len(pairs) % 2:
        raise ConfigError(f"{where}: expected [KEY, value, KEY, value, ...], got {show(pairs)}")
    if not all(isinstance(key, str) for key in pairs[::2]):
        raise ConfigError(
            f"{where}: expected a key such as QUANTIZER.BIT before each value, got {show(pairs)}"
        )
    found: list[Any] = []
    for i, item in enumerate(pairs):
        found.append(read(item) if i % 2 else item.upper())
    return found


def flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[Any]:
    """{QUANTIZER: {BIT: 8}} -> QUANTIZER.BIT, 8"""
    for key, value in tree.items():
        path = f"{prefix}{key}".upper()
        yield from flat(value, f"{path}.") if hasattr(value, "items") else (path, value)


def variants(cfg: Any) -> Iterator[tuple[str, Any]]:
    """For each pattern, its place and the config that it makes if no other pattern matches."""
    plain = _without_specific(cfg) if cfg.specific else cfg
    for i, rule in enumerate(cfg.specific):
        for pattern, pairs in rule.items():
            where = f"SPECIFIC[{i}][{pattern!r}]"
            if any(key.partition(".")[0] == "SPECIFIC" for key in pairs[::2]):
                raise ConfigError(f"{where}: SPECIFIC cannot be nested")
            try:
                yield where, plain._changed(pairs)
            except ConfigError as error:
                raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None


def resolve(cfg: Any, names: Sequence[str]) -> Any:
    """The config of one layer, known as `names` (fx name, module path): SPECIFIC applied and dropped.

    `cfg` has the fields `letter`, `specific` and `_resolved`. Layers with the same overrides share one frozen result;
    `clone()` it before changing anything.
    """
    matching = []
    for rule in cfg.specific:
        for pattern, pairs in rule.items():
            if any(map(_matcher(pattern), names)):
                matching.append(pairs)
    if not cfg.is_frozen():
        return _apply(cfg, matching, names)
    cache: dict[str, Any] = cfg._resolved
    key = repr(matching) if matching else ""
    if key not in cache:
        cache[key] = _apply(cfg, matching, names)
    return cache[key]


def unmatched(cfg: Any, names: Iterable[str]) -> list[str]:
    """Patterns that match none of `names` (the fx names and module paths of all layers)."""
    names = list(names)
    patterns = dict.fromkeys(pattern for rule in cfg.specific for pattern in rule)
    return [pattern for pattern in patterns if not any(map(_matcher(pattern), names))]


@functools.lru_cache(maxsize=4096)
def _matcher(pattern: str) -> Callable[[str], object]:
    """fnmatchcase for one pattern; the pattern is translated once, not once per layer."""
    return re.compile(translate(pattern)).match


def _apply(cfg: Any, matching: list[list[Any]], names: Sequence[str]) -> Any:
    try:
        return _without_specific(cfg).override(*(item for pairs in matching for item in pairs))
    except ConfigError as error:
        layer = names[0] if names else "?"
        lines = (f"{cfg.letter}.SPECIFIC, layer {layer!r}: {line}" for line in str(error).splitlines())
        raise ConfigError("\n".join(lines)) from None


def _without_specific(cfg: Any) -> Any:
    return cfg._changed(["SPECIFIC", []])
