"""Small helpers that scripts of the original project import."""

from __future__ import annotations

from typing import Any

from sparsebit.config import Config

__all__ = ["check_torch_version", "update_config"]


def update_config(config: Config, key: str, value: Any) -> None:
    """Set one option in place, even if the config is frozen: `update_config(cfg, "W.QUANTIZER.BIT", 4)`."""
    config._apply([key, value])


def check_torch_version(version: str) -> bool:
    """Whether the installed torch is at least `version`."""
    import torch

    return bool(torch.__version__ >= version)  # a TorchVersion: compares as versions, not as text
