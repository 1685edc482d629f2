"""onnx2torch reads shapes, slices and sizes from tensors while it runs; where these are constants, write them down.

Then torch.export, and so every export of the model, sees Python integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import interpolate

Values = list[Any]  # of one constant input; None where it is left out


class Slice(nn.Module):
    def __init__(self, places: dict[int, slice]):
        super().__init__()
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        for axis, place in self.places.items():
            x = x[(*[slice(None)] * (axis % x.dim()), place)]
        return x


class Reshape(nn.Module):
    def __init__(self, shape: list[int]):
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(self.shape)])


class Expand(nn.Module):
    def __init__(self, shape: list[int]):
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(torch.broadcast_shapes(x.shape, self.shape))


class Resize(nn.Module):
    def __init__(self, mode: str, align: bool | None, scales: list[float] | None, sizes: list[int] | None):
        super().__init__()
        self.mode, self.align, self.scales, self.sizes = mode, align, scales, sizes

    def forward(self, x: Tensor) -> Tensor:
        mode = {"linear": "bilinear", "cubic": "bicubic"}.get(self.mode, self.mode)
        return interpolate(x, self.sizes, self.scales, mode, self.align)


class Squeeze(nn.Module):
    def __init__(self, axes: list[int]):
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(tuple(self.axes))


class Split(nn.Module):
    def __init__(self, sizes: list[int], axis: int):
        super().__init__()
        self.sizes, self.axis = sizes, axis

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split(self.sizes, self.axis)


def slice_of(module: Any, starts: Values, ends: Values, axes: Any = None, steps: Any = None) -> nn.Module:
    steps = steps or [1] * len(starts)
    if min(steps) < 1:
        raise NotImplementedError(f"Slice with steps {steps}")
    return Slice(dict(zip(axes or range(len(starts)), map(slice, starts, ends, steps))))


def resize_of(module: Any, roi: Any = None, scales: Any = None, sizes: Any = None) -> nn.Module:
    inner = getattr(module, "_resize", module)
    if type(module).__name__ == "OnnxResizeV10":
        roi, scales = None, roi
    scales, sizes = (values[2:] if values else None for values in (scales, sizes))
    return Resize(inner.onnx_mode, inner.align_corners, scales, sizes)


STATIC: dict[str, Callable[..., nn.Module]] = {
    "OnnxSlice": slice_of,
    "OnnxReshape": lambda module, shape: Reshape(shape),
    "OnnxExpand": lambda module, shape: Expand(shape),
    "OnnxResize": resize_of,
    "OnnxResizeV10": resize_of,
    "OnnxSqueezeDynamicAxes": lambda module, axes: Squeeze(axes),
    "OnnxSplit13": lambda module, sizes: Split(sizes, module.axis),
}


def written_down(model: fx.GraphModule) -> fx.GraphModule:
    modules = dict(model.named_modules())
    for node in model.graph.nodes:
        module = modules.get(node.target) if node.op == "call_module" else None
        build = STATIC.get(type(module).__name__)
        places = [constant(model, given) for given in node.args[1:]]
        names = {name: constant(model, given) for name, given in node.kwargs.items()}
        constants = [*places, *names.values()]
        if build is None or not constants or Unknown in constants:
            continue
        parent, _, name = node.target.rpartition(".")
        setattr(model.get_submodule(parent), name, build(module, *places, **names))
        node.args, node.kwargs = node.args[:1], {}
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


class Unknown:
    """The value of a node that is no constant."""


def constant(model: fx.GraphModule, given: Any) -> Any:
    if not isinstance(given, fx.Node):
        return given
    if given.op != "get_attr":
        return Unknown
    value: Any = model
    for name in str(given.target).split("."):
        value = getattr(value, name)
    return value.tolist()
