"""Packing is bit-exact for every width, shape and axis, at the boundary integers, and refuses what does not fit."""

from __future__ import annotations

import pytest
import torch

from sparsebit.errors import SparsebitError
from sparsebit.numeric.words import pack_words, unpack_words, words_of


def bit_stream(values: list[int], bits: int) -> list[int]:
    """One long integer, cut into words: a reference without shifts across words."""
    number = sum(v << (i * bits) for i, v in enumerate(values))
    words = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(values) * bits // 32))]
    return [w - 2**32 if w >= 2**31 else w for w in words]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("length", [1, 7, 10, 11, 31, 32, 33, 64, 172])
@pytest.mark.parametrize("kind", ["random", "low", "high", "alternating"])
def test_round_trip_and_layout(bits, length, kind):
    top = 2**bits - 1
    values = {
        "random": torch.randint(0, top + 1, (3, length)),
        "low": torch.zeros(3, length, dtype=torch.long),
        "high": torch.full((3, length), top),
        "alternating": (torch.arange(3 * length) % 2 * top).view(3, length),
    }[kind].to(torch.uint8)
    packed = pack_words(values, bits)
    assert packed.dtype == torch.int32 and packed.shape == (3, words_of(length, bits))
    assert packed.tolist() == [bit_stream(row, bits) for row in values.tolist()]
    assert torch.equal(unpack_words(packed, bits, length), values)
    across = pack_words(values.T, bits, axis=0)
    assert torch.equal(across, packed.T)
    assert torch.equal(unpack_words(across, bits, length, axis=0), values.T)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("bad", [-1, "top"])
def test_d19_an_integer_outside_never_reaches_its_neighbour(bits, bad):
    """D19: the original packed -1 and 2^b, which flow into the fields beside them."""
    values = torch.zeros(2, 40, dtype=torch.int32)
    values[1, 5] = 2**bits if bad == "top" else bad
    with pytest.raises(SparsebitError, match="do not fit"):
        pack_words(values, bits)


def test_too_few_words_are_named():
    with pytest.raises(SparsebitError, match="need 4 words"):
        unpack_words(torch.zeros(2, 3, dtype=torch.int32), 4, 32)
