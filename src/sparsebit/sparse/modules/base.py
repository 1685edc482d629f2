"""SparseOpr: a layer that multiplies its parameters with masks, and with learned gates of its sparser, when
it runs.

It is a subclass of the layer's class, so code for `nn.Conv2d` works with `SConv2d`. Masks are buffers:
`w_mask` for the weight, `b_mask` for the bias, `<name>_mask` for other parameters, also for those of modules
inside the layer.
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
    moments: Any = None  # of its inputs (choose/moments.py)
    sparser: Any

    def __init__(self, org_module: nn.Module | None = None, config: Any = None):
        """Classes in the original's style call this without a layer and copy the attributes that they need."""
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
        """The parameters of the layer, without those of its sparser."""
        return {k: p for k, p in self.named_parameters() if not k.startswith("sparser.")}

    def mask_of(self, parameter: str) -> Tensor:
        """The mask of a parameter; ones if a user's class has no mask for it."""
        mask = self._buffers.get(mask_name(parameter))
        if mask is None:
            return torch.ones_like(self.get_parameter(parameter), dtype=torch.bool)
        return mask

    @property
    def masks_itself(self) -> bool:
        """Does the class define calc_mask(pre_mask), as classes in the original's style do?"""
        return type(self).calc_mask is not SparseOpr.calc_mask

    def calc_mask(self, pre_mask: Tensor | None = None) -> Tensor | None:
        """Set the masks of this layer as its sparser decides. calc_params() calls it if a subclass defines
        it.

        pre_mask   which channels the layer in front keeps, if known
        Returns which channels this layer keeps, if whole channels are pruned.
        """
        weight = getattr(self, "weight", None)
        if weight is None or weight.dim() < 2:  # a norm keeps its input channels
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
        """Inside, the layer has these values as parameters."""
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
