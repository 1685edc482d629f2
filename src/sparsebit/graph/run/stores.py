"""Places where values wait until they are read again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparsebit.errors import ConfigError


class Store:
    """Values wait on the "device" (no change), on the "cpu", or on "disk" in a temporary folder.

    The folder is removed with the store.
    """

    def __init__(self, keep: str = "device"):
        if keep not in ("device", "cpu", "disk"):
            raise ConfigError(f"offload: {keep!r} is not one of device, cpu, disk")
        self.keep = keep
        self._folder = None
        if keep == "disk":
            self._folder = tempfile.TemporaryDirectory(prefix="sparsebit-")
        self._count = 0

    def put(self, value: Any) -> Any:
        if self.keep == "device":
            return value
        return pytree.tree_map_only(Tensor, self._put_tensor, value)

    def get(self, value: Any) -> Any:
        is_kept = lambda v: isinstance(v, _Kept)
        return pytree.tree_map(lambda v: v.load() if is_kept(v) else v, value, is_leaf=is_kept)

    def _put_tensor(self, x: Tensor) -> Any:
        if self._folder is None:
            return _Kept(x.detach().cpu(), x.device, None)
        self._count += 1
        file = Path(self._folder.name) / f"{self._count}.pt"
        torch.save(x.detach().cpu().clone(), file)  # clone: a view would save its whole storage
        return _Kept(None, x.device, file)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


class _Kept:
    """A tensor that waits elsewhere; its file is deleted with it."""

    def __init__(self, value: Tensor | None, device: torch.device, file: Path | None):
        self.value = value
        self.device = device
        self.file = file

    def load(self) -> Tensor:
        if self.file is None:
            value = self.value
        else:
            value = torch.load(self.file, weights_only=True)
        assert value is not None
        return value.to(self.device)

    def __del__(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)
