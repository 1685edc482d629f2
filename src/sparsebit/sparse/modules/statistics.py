"""mean, var and the like over channels, as in norms that a forward computes: they are taken from the kept
channels.

The smaller model needs no help. In a masked model the call becomes a module with a mask of the values to use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.rewrite import fresh_name
from sparsebit.graph.run.calls import device_of


class Statistic(nn.Module):
    """`kept` is empty, or has a size of 1 for every axis behind the channels: (C, 1, 1) for pictures."""

    kept: Tensor

    def __init__(self, target: Any):
        super().__init__()
        self.target = target  # a function, or the name of a method
        self.register_buffer("kept", torch.ones(0, dtype=torch.bool))

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.kept.numel():
            input = input.index_select(-self.kept.dim(), self.kept.flatten().nonzero().flatten())
        if isinstance(self.target, str):
            return getattr(input, self.target)(*args, **kwargs)
        return self.target(input, *args, **kwargs)

    def set(self, kept: Tensor) -> None:
        """Set the kept channels. If all channels are kept, the forward has no extra work."""
        self.kept = (kept[:0].flatten() if bool(kept.all()) else kept).to(self.kept.device)

    def extra_repr(self) -> str:
        return str(getattr(self.target, "__name__", self.target))

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """A model that has not seen an input yet accepts a mask of any shape."""
        known = state.get(f"{prefix}kept")
        if isinstance(known, Tensor) and known.shape != self.kept.shape:
            self.kept = torch.ones(known.shape, dtype=torch.bool, device=self.kept.device)
        super()._load_from_state_dict(state, prefix, *rest)


def as_statistic(gm: fx.GraphModule, node: fx.Node) -> Statistic:
    """Replace a call by a module; the node keeps its name."""
    made = Statistic(node.target).train(gm.training).to(device_of(gm))
    node.op = "call_module"
    node.target = fresh_name(gm, f"{node.name}_kept")
    gm.add_submodule(node.target, made)
    return made


def statistics_of(gm: fx.GraphModule) -> dict[str, Statistic]:
    """The statistics by the name of their node."""
    found = {n.name: gm.get_submodule(str(n.target)) for n in gm.graph.nodes if n.op == "call_module"}
    return {name: module for name, module in found.items() if isinstance(module, Statistic)}
