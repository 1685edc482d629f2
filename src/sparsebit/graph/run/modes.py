"""Training flags of modules: eval mode inside a block, and the flags of one model for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Inside, all modules have the flag `training`; afterwards every module has its flag back."""
    flags = {m: m.training for m in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def training_flags(model: nn.Module) -> dict[str, bool]:
    """The flag of every module, by its path."""
    return {path: module.training for path, module in model.named_modules()}


def set_training(model: nn.Module, flags: dict[str, bool]) -> None:
    """Set the flags. A module without one gets the flag of the module around it."""
    for path, module in model.named_modules():
        while path not in flags:
            path = path.rpartition(".")[0]
        module.training = flags[path]
