"""Products and sums with constants become part of the weights beside them; the output stays."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsebit import QuantConfig, QuantModel
from sparsebit.quantization.converters.fold_affine import fold_affine

LAYERS = {
    "conv": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 8, 8), (6, 1, 1)),
    "grouped": (nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), (2, 4, 8, 8), (1, 6, 1, 1)),
    "transposed": (nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), (2, 4, 8, 8), (6, 1, 1)),
    "conv1d": (nn.Conv1d(4, 6, 3), (2, 4, 8), (6, 1)),
    "conv3d": (nn.Conv3d(4, 6, 1), (2, 4, 3, 3, 3), (6, 1, 1, 1)),
    "linear": (nn.Linear(4, 6), (2, 5, 4), (6,)),
    "norm": (nn.BatchNorm2d(6), (2, 6, 4, 4), (6, 1, 1)),
}


class Scaled(nn.Module):
    def __init__(self, layer: nn.Module, shape: tuple[int, ...], forward):
        super().__init__()
        self.layer, self.affine = layer, forward
        self.a, self.b = nn.Parameter(torch.rand(shape) + 0.5), nn.Parameter(torch.randn(shape))
        self.register_buffer("s", torch.tensor([1.7]))

    def forward(self, x):
        return self.affine(self, self.layer(x))


def folded(model: nn.Module, x: torch.Tensor) -> tuple[int, list]:
    model.eval()
    wanted = model(x)
    gm = torch.fx.symbolic_trace(copy.deepcopy(model))
    count = fold_affine(gm)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    torch.testing.assert_close(gm(x), wanted, rtol=1e-4, atol=1e-5)
    return count, [node.target for node in gm.graph.nodes if node.op in ("call_function", "call_method")]


@pytest.mark.parametrize("kind", LAYERS)
def test_scale_and_shift_of_each_channel(kind):
    layer, shape, per_channel = LAYERS[kind]
    affine = lambda net, x: (net.b + net.a * x) / 2 - 0.25
    count, left = folded(Scaled(layer, per_channel, affine), torch.randn(shape))
    assert count == 4 and left == []


@pytest.mark.parametrize(
    "affine",
    [
        lambda net, x: x * net.s + x,  # read twice
        lambda net, x: x * x.mean((2, 3), keepdim=True),  # not stored
        lambda net, x: net.s / x,
        lambda net, x: net.s - x,
        lambda net, x: x * torch.zeros(1),
    ],
)
def test_what_is_no_affine_function_of_one_reader_stays(affine):
    layer, _shape, per_channel = LAYERS["conv"]
    torch.manual_seed(0)
    gm = torch.fx.symbolic_trace(Scaled(layer, per_channel, affine).eval())
    assert fold_affine(gm) == 0


def test_a_constant_of_another_axis_stays():
    layer, shape, _ = LAYERS["conv"]
    count, _ = folded(Scaled(layer, (8,), lambda net, x: x * net.a), torch.randn(shape))
    assert count == 0


def test_a_layer_that_is_called_twice_stays():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.conv(self.conv(x) * 2.0) * 3.0

    assert folded(Twice(), torch.randn(1, 4, 3, 3))[0] == 0


def test_a_number_in_front_of_convolutions_scales_their_weights():
    class Ahead(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.tensor([1.3]))
            self.register_buffer("b", torch.tensor([0.4]))
            self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

        def forward(self, x):
            x = F.relu(x) * self.a + self.b
            return self.first(x), self.second(x)

    count, left = folded(Ahead(), torch.randn(2, 4, 6, 6))
    assert count == 1 and left == [F.relu, torch.add]


def test_a_config_that_keeps_batch_norms_keeps_these_too():
    layer, _shape, per_channel = LAYERS["conv"]
    model = Scaled(layer, per_channel, lambda net, x: x * net.a).eval()
    names = lambda config: [
        report.name for report in QuantModel(model, config).pass_reports if report.changes
    ]
    config = QuantConfig.load("w8a8")
    assert "fold_affine" in names(config)
    assert "fold_affine" not in names(config.override("SCHEDULE.FUSE_BN", False))
    assert "fold_affine" not in names(config.override("SCHEDULE.FOLD_AFFINE", False))


@pytest.mark.parametrize(
    ("affine", "left"),
    [
        (lambda net, x: F.relu(x) * 1.0, 1),
        (lambda net, x: 0 + F.relu(x) / torch.ones(1), 1),
        (lambda net, x: F.relu(x) + torch.zeros(1, 1, 1, 1), 2),  # could add axes
        (lambda net, x: F.relu(x) * 1.0001, 2),
    ],
)
def test_what_changes_nothing_is_removed(affine, left):
    layer, shape, per_channel = LAYERS["conv"]
    _, calls = folded(Scaled(layer, per_channel, affine), torch.randn(shape))
    assert len(calls) == left
