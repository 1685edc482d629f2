"""Legacy: a helper of the original."""

from __future__ import annotations


def check_torch_version(version: str) -> bool:
    """Is the installed torch at least `version`?"""
    import torch

    return bool(torch.__version__ >= version)  # a TorchVersion: compares as versions, not as text
