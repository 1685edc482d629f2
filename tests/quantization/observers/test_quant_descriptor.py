"""QuantDescriptor: the grid of one tensor, and what may change about it."""

from __future__ import annotations

import pytest
import torch
from observer_cases import SCHEMES, tensor_config

from sparsebit.errors import ConfigError
from sparsebit.numeric import QuantSpec
from sparsebit.quantization.common import QuantTarget
from sparsebit.quantization.quantizers.quant_descriptor import QuantDescriptor


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("letter", ["w", "a"])
@pytest.mark.parametrize("bit", [2, 4, 8])
def test_grid(scheme, letter, bit):
    qdesc = QuantDescriptor(tensor_config("minmax", letter, scheme, bit))
    symmetric = scheme.endswith("symmetric")
    low, high = (-(2 ** (bit - 1)), 2 ** (bit - 1) - 1) if symmetric else (0, 2**bit - 1)
    assert (qdesc.qmin, qdesc.qmax) == qdesc.qrange == (low, high)
    assert qdesc.scheme == getattr(torch, scheme.replace("-", "_"))
    assert (qdesc.is_symmetric, qdesc.is_perchannel) == (symmetric, "channel" in scheme)
    assert qdesc.target is (QuantTarget.WEIGHT if letter == "w" else QuantTarget.FEATURE)
    assert (qdesc.ch_axis, qdesc.bs_axis) == ((0, None) if letter == "w" else (1, 0))
    assert qdesc.spec == QuantSpec(bit, symmetric, qdesc.ch_axis if "channel" in scheme else None)
    assert repr(qdesc) == f"{'int' if symmetric else 'uint'}{bit} {scheme}"


def test_changes_show_in_the_spec():
    qdesc = QuantDescriptor(tensor_config("minmax", "w", "per-channel-symmetric"))
    qdesc.set_bit(4)
    qdesc.set_ch_axis(1)
    assert qdesc.spec == QuantSpec(4, True, 1) and qdesc.bit == 4
    qdesc.set_symmetric(False)
    assert qdesc.scheme == torch.per_channel_affine and qdesc.qrange == (0, 15)
    with pytest.raises(ConfigError, match="BIT"):
        qdesc.set_bit(0)
    assert qdesc.bit == 4


def test_layout():
    assert QuantDescriptor(tensor_config("minmax", layout="nlc")).ch_axis == 2
