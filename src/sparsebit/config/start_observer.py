"""The observer from which a learned quantizer starts: START of its class, unless the config names one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebit.config.base import Config
from sparsebit.registry import plain_name


def with_start(
    options: dict[str, Any], given: Mapping[str, Any], quantizers: Mapping[Any, Any], before: str = ""
) -> dict[str, Any]:
    """`options` of W or A with the observer of a newly chosen quantizer, if `given` names none.

    before   the type of the quantizer so far: the observer changes only with the type.
    """
    sections = {str(name).lower(): section for name, section in given.items()}
    chosen = _type_in(sections.get("quantizer"))
    if chosen is None or chosen == before or chosen not in quantizers:
        return options
    start = getattr(quantizers[chosen], "START", "")
    if not start or _type_in(sections.get("observer")) is not None:
        return options
    observer = options.get("observer") or {}
    if isinstance(observer, Config):
        own = observer._options()
    else:
        own = dict(observer)
    return {**options, "observer": {**own, "type": start}}


def is_quantizer_type(path: str) -> bool:
    """Is it the key on which the default observer depends?"""
    return path.upper().endswith("QUANTIZER.TYPE")


def _type_in(section: Any) -> str | None:
    """The TYPE that a section of a mapping names."""
    if hasattr(section, "items"):
        named = [v for k, v in section.items() if str(k).lower() == "type"]
    else:
        named = []
    if named and isinstance(named[0], str):
        return str(plain_name(named[0]))
    return None
