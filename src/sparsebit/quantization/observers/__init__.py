"""Observers. A new file here that registers a class with a TYPE is a new observer."""

from __future__ import annotations

from typing import Any, TypeVar

from sparsebit.quantization.observers.base import CachingObserver, DataCache, Observer
from sparsebit.registry import Registry

__all__ = ["OBSERVERS_MAP", "CachingObserver", "DataCache", "Observer", "build_observer", "register_observer"]

OBSERVERS_MAP: Registry[type[Observer]] = Registry("observer")
O = TypeVar("O", bound=type[Observer])  # noqa: E741


def register_observer(cls: O) -> O:
    """`@register_observer` on a class with a TYPE. One that replaces another keeps the options of its section."""
    known = OBSERVERS_MAP.get(cls.TYPE)
    if known is not None and cls.Params is Observer.Params:
        cls.Params = known.Params  # type: ignore[misc]
    OBSERVERS_MAP.register()(cls)
    return cls


def build_observer(config: Any, qdesc: Any) -> Observer:
    """The observer that `config` (the W or A section of a config) names."""
    return OBSERVERS_MAP[config.observer.type](config, qdesc)


OBSERVERS_MAP.discover(__name__)
