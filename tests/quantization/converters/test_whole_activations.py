"""Activations that a forward writes out become one op, however they are spelled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsebit.quantization import QuantModel
from sparsebit.quantization.converters.whole_activations import whole_activations

SPELLINGS = {
    "x * sigmoid(x)": (lambda x: x * torch.sigmoid(x), F.silu),
    "x / (1 + exp(-x))": (lambda x: x / (1 + torch.exp(-x)), F.silu),
    "x * relu6(x + 3) / 6": (lambda x: x * F.relu6(x + 3) / 6, F.hardswish),
    "relu6(x + 3) * (1 / 6) * x": (lambda x: F.relu6(x + 3) * (1 / 6) * x, F.hardswish),
    "x * clamp(x / 6 + 0.5, 0, 1)": (lambda x: x * torch.clamp(x / 6 + 0.5, 0, 1), F.hardswish),
    "clip(x + 3, 0, 6) / 6": (lambda x: (x + 3).clip(0, 6) / 6, F.hardsigmoid),
    "erf": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), F.gelu),
    "erf in parts": (lambda x: x * (torch.erf(x * 0.70710678) + 1) * 0.5, F.gelu),
    "tanh": (lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3))), F.gelu),
    "tanh of softplus": (lambda x: x * torch.tanh(F.softplus(x)), F.mish),
}


class Written(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.written = forward

    def forward(self, x):
        return self.head(self.written(self.conv(x)))


def targets(model: nn.Module) -> list:
    gm = torch.fx.symbolic_trace(model)
    whole_activations(gm)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    x = torch.randn(2, 3, 6, 6) * 4
    torch.testing.assert_close(gm(x), model(x))
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_op(name):
    written, function = SPELLINGS[name]
    assert targets(Written(written).eval()) == [function]


def test_constants_that_the_model_stores_count_as_numbers():
    class Stored(Written):
        def __init__(self):
            super().__init__(None)
            self.register_buffer("three", torch.tensor(3.0))
            self.register_buffer("six", torch.tensor([6.0]))
            self.clip = nn.ReLU6()

        def forward(self, x):
            x = self.conv(x)
            return self.head(x * self.clip(x + self.three) / self.six)

    assert targets(Stored().eval()) == [F.hardswish]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x * torch.sigmoid(1.702 * x),  # another function
        lambda x: x * F.relu6(x + 2) / 6,
        lambda x: x * torch.sigmoid(x[:, :1]),  # of another value
    ],
)
def test_other_functions_stay(other):
    assert not {F.silu, F.hardswish, F.gelu} & set(targets(Written(other).eval()))


def test_a_part_that_something_else_reads_stays():
    class Shared(Written):
        def forward(self, x):
            x = self.conv(x)
            gate = torch.sigmoid(x)
            return self.head(x * gate), gate

    gm = torch.fx.symbolic_trace(Shared(None).eval())
    assert whole_activations(gm) == 0


def test_a_learned_number_stays():
    class Learned(Written):
        def __init__(self):
            super().__init__(None)
            self.three = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            x = self.conv(x)
            return self.head(x * F.relu6(x + self.three) / 6)

    gm = torch.fx.symbolic_trace(Learned().eval())
    assert whole_activations(gm) == 0


def test_the_file_has_integer_kernels_for_a_written_hardswish(tmp_path):
    model = Written(lambda x: x * F.relu6(x + 3) / 6).eval()
    qmodel = QuantModel(model).calibrate([torch.randn(4, 3, 12, 12)], progress=False)
    qmodel.set_quant(True, True)
    report = qmodel.export_onnx(torch.randn(2, 3, 12, 12), str(tmp_path / "m.onnx"))
    assert report.ok
    assert report.integer["QLinearMul"] == 1
