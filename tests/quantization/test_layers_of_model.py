"""Which QModules only move values is an attribute of the class."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.quantization.layers import moves_values
from sparsebit.quantization.modules import QMODULE_MAP
from sparsebit.quantization.modules.base import Mover, define


@pytest.mark.parametrize(
    "op",
    [nn.Flatten, torch.cat, torch.where, nn.MaxPool2d, nn.PixelShuffle, torch.Tensor.to, len, nn.Identity],
)
def test_ops_that_move_values(op):
    assert QMODULE_MAP[op].moves_values


@pytest.mark.parametrize("op", [nn.Conv2d, nn.ReLU, nn.AvgPool2d, torch.add, nn.LSTM])
def test_ops_that_compute_values(op):
    assert not QMODULE_MAP[op].moves_values


def test_a_class_of_a_plug_in_declares_it():
    """The answer was the name of the file before: a class in another file could not move values."""

    def rolled(x):
        return x.roll(1)

    class_of_plug_in = define("Rolled", Mover, rolled)
    assert moves_values(class_of_plug_in())
    assert not moves_values(nn.Flatten())
