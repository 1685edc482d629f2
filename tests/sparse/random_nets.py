"""Random small networks for pruning: convolutions, norms, additions, concatenations, splits, reshapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Random(nn.Module):
    """Steps, each on values made before; what is left over is concatenated for the classifier."""

    def __init__(self, steps):
        super().__init__()
        self.layers, self.calls, channels, used = nn.ModuleList(), [], [3], set()
        for kind, first, second, n in steps:
            first, second = first % len(channels), second % len(channels)
            layer, run, out = STEPS[kind](channels[first], channels[second], n)
            self.calls.append((run, len(self.layers), first, second))
            self.layers.append(layer if layer is not None else nn.Identity())
            used |= {first, second} if kind in ("add", "mul", "cat") else {first}
            channels += out
        self.left = [i for i in range(len(channels)) if i not in used]
        self.fc = nn.Linear(sum(channels[i] for i in self.left), 3)

    def forward(self, x):
        values = [x]
        for run, layer, first, second in self.calls:
            out = run(self.layers[layer], values[first], values[second])
            values += out if isinstance(out, list) else [out]
        return self.fc(torch.cat([values[i].mean((2, 3)) for i in self.left], 1))


def with_layer(layer, out):
    return layer, lambda f, a, b: f(a), [out]


def grouped(c, d, n):
    groups = max(g for g in range(1, n + 1) if c % g == 0)
    return with_layer(nn.Conv2d(c, 2 * groups, 1, groups=groups), 2 * groups)


def halves(c, d, n, run):
    """Where the channels can be halved."""
    return (None, run, [c]) if c % 2 == 0 else (None, lambda f, a, b: a.relu(), [c])


# (channels of the first and second input, a number) -> (layer, what runs, channels of the results)
STEPS = {
    "conv": lambda c, d, n: with_layer(nn.Conv2d(c, 2 * n, 3, padding=1), 2 * n),
    "grouped": grouped,
    "depthwise": lambda c, d, n: with_layer(nn.Conv2d(c, c, 3, padding=1, groups=c), c),
    "norm": lambda c, d, n: with_layer(nn.BatchNorm2d(c), c),
    "layer norm": lambda c, d, n: (
        nn.LayerNorm(c),
        lambda f, a, b: f(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        [c],
    ),
    "relu": lambda c, d, n: (None, lambda f, a, b: F.relu(a), [c]),
    "sigmoid": lambda c, d, n: (None, lambda f, a, b: a.sigmoid(), [c]),
    "add": lambda c, d, n: (nn.Identity() if c == d else nn.Conv2d(d, c, 1), lambda f, a, b: a + f(b), [c]),
    "mul": lambda c, d, n: (
        nn.Identity() if c == d else nn.Conv2d(d, c, 1),
        lambda f, a, b: a * f(b).mean((2, 3), keepdim=True),
        [c],
    ),
    "cat": lambda c, d, n: (None, lambda f, a, b: torch.cat([a, b], 1), [c + d]),
    "split": lambda c, d, n: (
        (None, lambda f, a, b: list(a.split([1, c - 1], 1)), [1, c - 1])
        if c > 1
        else (None, lambda f, a, b: a.tanh(), [c])
    ),
    "chunk": lambda c, d, n: (
        (None, lambda f, a, b: list(a.chunk(2, 1)), [c // 2, c // 2])
        if c % 2 == 0
        else (None, lambda f, a, b: a.cos(), [c])
    ),
    "pool": lambda c, d, n: (None, lambda f, a, b: F.max_pool2d(a, 3, 1, 1), [c]),
    "pad": lambda c, d, n: (
        None,
        lambda f, a, b: F.pad(a, (0, 0, 0, 0, n % 3, n % 2)),
        [c + n % 3 + n % 2],
    ),
    "linear": lambda c, d, n: (
        nn.Linear(c, n),
        lambda f, a, b: f(a.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(a.shape[0], n, 4, 4),
        [n],
    ),
    "reshape": lambda c, d, n: halves(
        c, d, n, lambda f, a, b: a.view(a.shape[0], 2, c // 2, 4, 4).transpose(1, 2).flatten(1, 2)
    ),
    "slice": lambda c, d, n: (None, lambda f, a, b: a[:, c // 3 :], [c - c // 3]),
    "sum": lambda c, d, n: (None, lambda f, a, b: a.sum(1, keepdim=True), [1]),
}
