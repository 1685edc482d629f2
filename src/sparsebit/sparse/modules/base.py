"""SparseOpr: a layer whose parameters are multiplied by masks, and by the learned gates of its sparser, when it runs.

The class is that of the layer itself, so what works on `nn.Conv2d` works on `SConv2d`. Masks are buffers: `w_mask` of
the weight, `b_mask` of the bias, `<name>_mask` of any other parameter, also of those in modules that the layer holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NAMES = {"weight": "w_mask", "bias": "b_mask"}


def mask_name(parameter: str) -> str:
    return NAMES.get(parameter, f"{parameter.replace('.', '_')}_mask")


class SparseOpr(nn.Module):
    normed = False  # a batch norm follows
    moments: Any = None  # of its inputs (refit.py)
    sparser: Any

    def __init__(self, org_module: nn.Module | None = None, config: Any = None):
        """Without a layer, as a class of the original's style calls it: such a class takes what it needs by itself."""
        nn.Module.__init__(self)
        self.sparser = None
        if org_module is None:
            return
        for name, value in vars(org_module).items():  # the same layer: its parameters, options and hooks
            if isinstance(value, dict):
                self.__dict__[name] = value.copy()
            else:
                self.__dict__[name] = value
        for name, p in org_module.named_parameters():
            self.register_buffer(mask_name(name), torch.ones(p.shape, dtype=torch.bool, device=p.device))
        if config is not None:
            self.build_sparser(config)

    def build_sparser(self, config: Any) -> None:
        from sparsebit.sparse.sparsers import build_sparser

        self.sparser = build_sparser(config, self).train(self.training)

    def layer_parameters(self) -> dict[str, nn.Parameter]:
        """Those of the layer, without its sparser's."""
        return {k: p for k, p in self.named_parameters() if not k.startswith("sparser.")}

    def mask_of(self, parameter: str) -> Tensor:
        """All ones for a parameter without a mask, as a class of the user's own may have it."""
        mask = self._buffers.get(mask_name(parameter))
        if mask is None:
            return torch.ones_like(self.get_parameter(parameter), dtype=torch.bool)
        return mask

    @property
    def masks_itself(self) -> bool:
        """Whether the class defines its own calc_mask(pre_mask), as those of the original's style do."""
        return type(self).calc_mask is not SparseOpr.calc_mask

    def calc_mask(self, pre_mask: Tensor | None = None) -> Tensor | None:
        """Set the masks of this layer alone, as its sparser says. calc_params() calls it where a subclass has its own.

        pre_mask   which channels the layer in front of this one keeps, if it told
        Returns which channels this one keeps, if whole channels go.
        """
        weight = getattr(self, "weight", None)
        if weight is None or weight.dim() < 2:  # a norm keeps what it reads
            if pre_mask is not None:
                for name in self.layer_parameters():
                    self.mask_of(name).copy_(pre_mask)
            return pre_mask
        mask = self.sparser.calc_mask(weight)
        self.mask_of("weight").copy_(mask)
        if self.sparser.kind == "unstructured":
            return None
        kept: Tensor = mask.flatten(1).any(1)
        if getattr(self, "bias", None) is not None:
            self.mask_of("bias").copy_(kept)
        return kept

    def reset_masks(self) -> None:
        for name in self.layer_parameters():
            self.mask_of(name).fill_(True)

    def masked(self, name: str) -> Tensor:
        """The parameter as the layer uses it."""
        p = self.get_parameter(name)
        value = p * self.mask_of(name).to(p.dtype)
        gate = None
        if self.sparser is not None:
            gate = self.sparser.gate(self, name)
        if gate is None:
            return value
        return value * gate.to(p.dtype)

    @contextmanager
    def using(self, values: dict[str, Tensor]) -> Iterator[None]:
        """Inside, the layer has these values for parameters."""
        changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for name, value in values.items():
            owner, _, last = name.rpartition(".")
            module = self.get_submodule(owner)
            changed.append((module.__dict__, {"_parameters": module.__dict__["_parameters"]}))
            module.__dict__["_parameters"] = {**module.__dict__["_parameters"], last: value}
        if isinstance(self, nn.RNNBase):
            changed.append((self.__dict__, {"_flat_weights": self._flat_weights}))
            self.__dict__["_flat_weights"] = [self._parameters[n] for n in self._flat_weights_names]
        try:
            yield
        finally:
            for target, old in reversed(changed):
                target.update(old)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.using({name: self.masked(name) for name in self.layer_parameters()}):
            return super().forward(*args, **kwargs)
