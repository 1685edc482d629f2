"""Linear layers by least squares: sums over the data first, then the weights. One pass, no step size, no
targets.

If a batch norm follows, the norm of a filter only changes how fast training turns the filter. So filters get
a wanted norm (docs/experiments.md has the measurements), and the batch norm compensates it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DAMPING = (1e-4, 1e-2, 1.0)  # of the mean variance of the inputs
CONSTANT = 1e-8  # of the mean square of the inputs: a smaller variance is rounding
PIECE = 1 << 24  # numbers at a time
LEAST = 1024  # positions of a batch


class Layer(NamedTuple):
    """A linear layer or a convolution without groups, perhaps with a batch norm behind it; its kept inputs
    and outputs."""

    linear: Any
    norm: Any = None
    reads: Any = slice(None)
    makes: Any = slice(None)


def moment(
    layer: Layer, x: Tensor, y: Tensor, per_weight: float, draw: torch.Generator, batch: int = 0
) -> Tensor:
    """Sums over x' [x' y]: x' is the input of a filter at a position and a one, y is the wanted output there.

    There are two sums, each over every other image. A fit to one can be tested on the other.
    per_weight   positions per weight of a filter, drawn at random; at least LEAST
    """
    linear = layer.linear
    images = len(y)
    if isinstance(linear, nn.Linear):
        x, y = (v.reshape(-1, v.shape[-1]) for v in (x, y))
    else:
        if linear.padding_mode == "zeros":
            mode = "constant"
        else:
            mode = linear.padding_mode
        x = F.pad(x, linear._reversed_padding_repeated_twice, mode)
    places = (len(y), *y.shape[2:])
    x = x[:, layer.reads]
    weights = x.shape[1] * linear.weight[0, 0].numel()
    some = torch.randperm(math.prod(places), generator=draw)[: max(LEAST, math.ceil(per_weight * weights))]
    found = torch.zeros((2, weights + 1, weights + 1 + y.shape[1]), dtype=torch.float64, device=x.device)
    for piece in some.to(x.device).split(max(1, PIECE // weights)):
        at = torch.unravel_index(piece, places)
        half = (at[0] * images // len(y) + batch) % 2
        a = _read(linear, x, at).double()
        b = _at(y, at).double()
        a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        for i in range(2):
            found[i] += a[half == i].T @ torch.cat([a, b], 1)[half == i]
    return found


def total(layer: Layer, y: Tensor, batch: int = 0) -> Tensor:
    """The sums without x: the number of positions, and the sum over y."""
    if isinstance(layer.linear, nn.Linear):
        rows = y
    else:
        rows = y.movedim(1, -1)
    rows = rows.reshape(len(rows), -1, rows.shape[-1]).double()
    found = rows.new_zeros(2, 1, 1 + rows.shape[-1])
    for i in range(2):
        part = rows[(i + batch) % 2 :: 2].flatten(0, 1)
        found[i, 0] = torch.cat([rows.new_tensor([len(part)]), part.sum(0)])
    return found


def _read(linear: Any, x: Tensor, at: Sequence[Tensor]) -> Tensor:
    """The inputs of the filters at these positions of their output, one row each."""
    if len(at) == 1:
        return x[at[0]]
    starts = [place * stride for place, stride in zip(at[1:], linear.stride)]
    taps = []
    for tap in itertools.product(*map(range, linear.kernel_size)):
        taps.append(_at(x, (at[0], *(s + k * d for s, k, d in zip(starts, tap, linear.dilation)))))
    return torch.stack(taps, 2).flatten(1)


def _at(value: Tensor, at: Sequence[Tensor]) -> Tensor:
    """All channels at these positions, one row each."""
    index: Any = (at[0], slice(None), *at[1:])
    return value[index]


def solve(sums: Tensor, size: float, layer: Layer) -> None:
    """Set the layer to the closest fit; with a norm, filters get the norm `size`."""
    matrix, bias = _solution(sums, True, DAMPING[0])
    _set(layer, sums, matrix, bias, size)


def renew(layer: Layer, halves: Tensor) -> bool:
    """Change the layer to add y to its output, as far as that holds for data that it was not fitted to.

    Returns whether weights were changed. Without x, or with little data, only the mean is corrected, or
    nothing.
    """
    linear = layer.linear
    norm = layer.norm
    sums = halves.sum(0)
    n = len(sums) - 1
    if not halves[:, n, n].all() or not sums.isfinite().all():
        return False
    bias = linear.bias if norm is None else norm.bias
    how = _best(halves, bias is not None, layer.makes)
    more, shift = _change(sums, bias is not None, how)
    if isinstance(how, str):
        if bias is not None:
            bias += shift
        return False
    weight = linear.weight[:, layer.reads].double().flatten(1)
    if norm is None:
        _set(layer, sums, weight + more, shift if bias is None else bias + shift, 0.0)
        return True
    gain = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    size = float(weight.norm(dim=1).mean()) or 1.0
    offset = (0 if linear.bias is None else linear.bias) - norm.running_mean
    _set(layer, sums, gain[:, None] * weight + more, norm.bias + gain * offset + shift, size)
    return True


def _change(sums: Tensor, free: bool, how: str | float) -> tuple[Tensor, Tensor]:
    """The change of the weights and of the constant, if it is free: "none", the "mean", or a fit with some
    damping."""
    if isinstance(how, float):
        return _solution(sums, free, how)
    n = len(sums) - 1
    mean = sums[n, n + 1 :] / sums[n, n] * (free and how == "mean")
    return mean.new_zeros(len(mean), n), mean


def _best(halves: Tensor, free: bool, makes: Any) -> str | float:
    """The kind of change that is closest for each half when it is made on the other half."""
    n = halves.shape[1] - 1
    # otherwise there is too little data for so many weights
    enough = n and bool((halves[:, n, n] >= n / 2).all())
    errors: dict[str | float, float] = dict.fromkeys(("none", "mean", *(DAMPING if enough else ())), 0.0)
    for how in errors:
        for fitted, held in (halves, halves.flip(0)):
            matrix, bias = _change(fitted, free, how)
            errors[how] += _error(torch.cat([matrix, bias[:, None]], 1)[makes], held, makes)
    return min(errors, key=errors.__getitem__)


def _error(matrix: Tensor, sums: Tensor, makes: Any) -> float:
    """The sum of squares of y minus the matrix times x', without the constant part of y."""
    n = len(sums)
    return float((matrix @ sums[:, :n] * matrix).sum() - 2 * (matrix * sums[:, n:].T[makes]).sum())


def _solution(sums: Tensor, free: bool, damping: float) -> tuple[Tensor, Tensor]:
    """The matrix, and the constant if it is free."""
    n = len(sums) - 1
    mean = sums[n] / sums[n, n] * free  # of x, of the one, of y
    moved = sums[:n] / sums[n, n] - mean[:n, None] * mean
    spread = moved[:, :n]
    joint = moved[:, n + 1 :]
    scale = torch.maximum(spread.diagonal().mean(), CONSTANT * sums.diagonal()[:n].mean() / sums[n, n])
    damped = spread + damping * scale.clamp_min(1e-30) * torch.eye(n).to(spread)
    matrix = torch.cholesky_solve(joint, torch.linalg.cholesky(damped)).T
    return matrix, mean[n + 1 :] - matrix @ mean[:n]


def _set(layer: Layer, sums: Tensor, matrix: Tensor, bias: Tensor, size: float) -> None:
    linear = layer.linear
    norm = layer.norm
    n = len(sums) - 1
    shape = linear.weight[:, layer.reads].shape
    if norm is None:
        linear.weight[:, layer.reads] = matrix.reshape(shape).to(linear.weight)
        if linear.bias is not None:
            linear.bias.copy_(bias)
        return
    mean = sums[n, :n] / sums[n, n]
    spread = sums[:n, :n] / sums[n, n] - mean[:, None] * mean
    center = matrix @ mean
    var = (matrix @ spread * matrix).sum(1).clamp_min(0)
    scale = size / matrix.norm(dim=1).clamp_min(1e-12)
    linear.weight[:, layer.reads] = (matrix * scale[:, None]).reshape(shape).to(linear.weight)
    norm.running_mean.copy_(center * scale + (0 if linear.bias is None else linear.bias))
    norm.running_var.copy_(var * scale**2)
    norm.weight.copy_((var + norm.eps / scale**2).sqrt())
    norm.bias.copy_(bias + center)
