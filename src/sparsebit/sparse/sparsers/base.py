"""Sparser: one per layer. It scores the weights and channels of the layer; the lowest scores are removed.

A new sparser is a file with a class that has a STRATEGY and `weights(layer)`, the score of every single
weight. The score of a channel is their sum, unless `channels(layer, name, axis)` returns another one. A
sparser that needs data sets NEEDS, and collects the data in `see(layer, x, y)`, batch by batch. A sparser in
the original's style defines `calc_mask(x)` instead: it gets a weight and returns its mask
(choose/plugin_masks.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sparsebit.config import Config
from sparsebit.errors import ConfigError
from sparsebit.numeric.masks import keep_best

# these can judge most layers
OTHERS = {"l1norm": "", "wanda": " with batches", "taylor": " with batches and a loss"}
BOTH = ("structured", "unstructured")


class Sparser(nn.Module):
    STRATEGY: ClassVar[str] = ""
    KINDS: ClassVar[tuple[str, ...]] = BOTH
    NEEDS: ClassVar[str] = ""  # "batches", or "gradients": batches with a loss
    COMPARABLE: ClassVar[bool] = False  # are scores of different layers on one scale?
    JUDGES: ClassVar[str] = "layers with weights"  # for a message, if a model has no such layers
    PER_ROW: ClassVar[bool] = False  # single weights compete inside an output channel, not inside the layer

    class Params(Config):
        """Options of a sparser, read from SPARSER.<STRATEGY> of the config."""

    def __init__(self, config: Any, opr: Any = None):
        super().__init__()
        self.cfg = getattr(config, "sparser", config)
        self.kind: str = self.cfg.type
        self.type = self.cfg.TYPE  # type: ignore[method-assign]  # the original's name for it
        self.strategy: str = self.cfg.strategy
        self.pattern: tuple[int, ...] | None = None
        self.ratio: float = self.cfg.ratio
        if self.cfg.pattern:
            n, m = self.pattern = tuple(map(int, self.cfg.pattern.split(":")))
            self.ratio = 1 - n / m  # the ratio of the pattern; zero keeps the layer whole
        self.params = self.cfg.params(self.STRATEGY)

    def set_ratio(self, ratio: float) -> None:
        """Set the share of this layer to remove; it counts from the next calc_params() on."""
        if not 0 <= ratio <= 1:
            raise ConfigError(f"ratio: must be from 0 to 1, got {ratio}")
        if self.pattern and ratio:
            taken = 1 - self.pattern[0] / self.pattern[1]
            if abs(ratio - taken) > 0.01:
                raise ConfigError(
                    f"ratio: PATTERN {self.cfg.pattern} takes {taken:.3g} of a layer, not {ratio}; 0 keeps it whole"
                )
        self.ratio = float(ratio)

    # -- what a subclass defines ---------------------------------------------------------------------
    def weights(self, layer: nn.Module, name: str = "weight") -> Tensor:
        """The score of every weight, in the shape of the parameter `name`."""
        raise NotImplementedError(f"{type(self).__name__} must define weights(layer, name) or calc_mask(x)")

    def calc_mask(self, x: Tensor) -> Tensor:
        """The mask of the weight `x`: true, or one, for kept positions. `self.ratio` is the share to remove.

        Layers of a user call it. A subclass that defines it decides with it about single weights, or about
        whole output channels if TYPE is structured.
        """
        layer = nn.Module()
        layer.register_parameter("weight", nn.Parameter(x.detach(), requires_grad=False))
        if self.kind == "unstructured":
            return keep_best(self.weights(layer), self.ratio, self.PER_ROW)
        worth = self.channels(layer, "weight", 0, True)
        if worth is None:
            raise ConfigError(
                f"STRATEGY: {self.strategy} cannot score single weights; use l1norm, or another"
            )
        kept = keep_best(worth, self.ratio)
        return kept.view(-1, *[1] * (x.dim() - 1)).expand(x.shape)

    @property
    def decides(self) -> bool:
        """Does a subclass decide by calc_mask(x), and not by scores?"""
        classes = type(self).__mro__
        masks, worths = (
            next(cls for cls in classes if name in vars(cls)) for name in ("calc_mask", "weights")
        )
        return masks is not Sparser and issubclass(masks, worths)

    def channels(self, layer: nn.Module, name: str, axis: int, makes: bool) -> Tensor | None:
        """The score of every position on `axis` of the parameter `name`; None if it cannot judge them.

        makes   is it the axis of the channels that the layer makes? Otherwise the layer reads them. Both count: a
                filter without readers is as useless as a filter without output.
        """
        if layer.get_parameter(name).dim() > 1:
            return per_channel(self.weights(layer, name), axis)
        return None

    def see(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """One forward of the layer (NEEDS). With gradients, `output` takes part in the backward that follows."""

    def see_gradients(self, layer: nn.Module) -> None:
        """Called after the backward of a batch: the parameters have the gradients of that batch."""

    def penalty(self, layer: nn.Module) -> Tensor | None:
        """The term for the training loss, if this sparser learns while the model trains."""
        return None

    def gate(self, layer: nn.Module, name: str) -> Tensor | None:
        """A learned factor on the parameter `name`, which broadcasts."""
        return None

    def skips(self, layer: nn.Module) -> bool:
        """Is this sparser unable to judge the single weights of this layer? They are all kept then."""
        return False

    def solve(
        self, layer: nn.Module, ratio: float, pattern: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor] | None:
        """New weights and their mask, for a sparser that also corrects the kept weights."""
        return None

    def extra_repr(self) -> str:
        return f"{self.strategy}, {self.kind}, ratio={self.ratio}"


def cannot_judge(sparsers: Iterable[Sparser]) -> ConfigError:
    """The error for a model in which no sparser can judge any layer."""
    judges = dict(sorted((s.strategy, f"{s.strategy} judges {s.JUDGES}") for s in sparsers))
    others = [f"{name}{how}" for name, how in OTHERS.items() if name not in judges]
    return ConfigError(
        f"STRATEGY: {', '.join(judges.values())}; nothing in this model that could go is of that kind; "
        f"use {' or '.join(others)}"
    )


# -- what layers look like -------------------------------------------------------------------------------
def is_weighted(layer: nn.Module) -> bool:
    """Is it a matrix product, whose weight has an axis of inputs and one of outputs?"""
    return isinstance(layer, (nn.Linear, _ConvNd))


def by_output(layer: nn.Module, name: str, value: Tensor) -> Tensor:
    """The parameter `name`, or a tensor of its shape, as (outputs, inputs of each, ...). A second call
    restores the order."""
    if name != "weight" or not isinstance(layer, _ConvTransposeNd):
        return value
    return value.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)


def per_output(layer: nn.Module, name: str, worth: Tensor) -> Tensor:
    """Turn the score of every weight into the score of every channel that the layer makes."""
    return per_channel(by_output(layer, name, worth), int(isinstance(layer, nn.Embedding)))


def on_axis(layer: nn.Module, name: str, worth: Tensor) -> Tensor:
    """Turn the score of every channel that the layer makes into the score of every position on their axis of the
    parameter.

    A transposed convolution has the channels of one group there: the same channel of every group is one
    position.
    """
    if name != "weight" or not isinstance(layer, _ConvTransposeNd):
        return worth
    return worth.unflatten(0, (layer.groups, -1)).sum(0)


def in_axis(layer: nn.Module) -> int:
    """The axis of layer.weight with the input channels."""
    return int(not isinstance(layer, _ConvTransposeNd))


def output_axis(layer: nn.Module, output: Tensor) -> int:
    """The axis of the channels in the output of the layer, which has a batch."""
    if isinstance(layer, (_ConvNd, _NormBase)):
        return 1
    return output.dim() - 1


def input_axis(layer: nn.Module, x: Tensor) -> int:
    """The axis of the channels in the input of the layer."""
    return x.dim() - 1 - (layer.weight.dim() - 2 if isinstance(layer, _ConvNd) else 0)


def along_inputs(layer: Any, vector: Tensor) -> Tensor:
    """Bring one value per input channel into a shape that broadcasts with layer.weight."""
    if not isinstance(layer, _ConvNd):
        return vector
    tail = [1] * (layer.weight.dim() - 2)
    if isinstance(layer, _ConvTransposeNd):
        return vector.view(-1, 1, *tail)
    parts = vector.view(layer.groups, 1, -1).expand(-1, layer.out_channels // layer.groups, -1)
    return parts.reshape(layer.out_channels, -1, *tail)


def ends_channels(layer: Any, makes: bool) -> bool:
    """Are channels final behind this layer: is it a batch norm, or a layer without a batch norm behind it?"""
    return isinstance(layer, _NormBase) or (makes and not getattr(layer, "normed", False))


def per_channel(worth: Tensor, axis: int) -> Tensor:
    return worth.movedim(axis, 0).reshape(worth.shape[axis], -1).sum(1)


def magnitude(layer: nn.Module, name: str = "weight") -> Tensor:
    size = layer.get_parameter(name).detach().abs()
    if size.dtype == torch.float64:
        return size
    return size.float()
