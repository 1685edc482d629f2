"""Every layout, every width, group and shape: what is read is what was written, bit by bit, and others can read it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsebit.errors import ConfigError, ExportError
from sparsebit.llm import legacy
from sparsebit.llm.formats import FORMATS, format_of, spec_of
from sparsebit.llm.formats import gptq as gptq_layout
from sparsebit.numeric.quantized_weight import QuantizedWeight, group_index

SHAPES = [(32, 64), (48, 96), (5, 7), (64, 172)]
CASES = [
    (bits, group, symmetric, shape)
    for bits in (2, 3, 4, 8)
    for group in (None, 32, 64)
    for symmetric in (True, False)
    for shape in SHAPES
]


def some_weight(bits, group, symmetric, shape, reordered=False) -> QuantizedWeight:
    """Random codes with the smallest and the largest among them."""
    outputs, inputs = shape
    codes = torch.randint(0, 2**bits, shape).to(torch.uint8)
    codes[0], codes[-1] = 0, 2**bits - 1
    groups = int(group_index(inputs, group)[-1]) + 1
    zeros = torch.randint(0, 2**bits, (outputs, groups)).to(torch.uint8)
    zeros[0], zeros[-1] = 0, 2**bits - 1
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    g_idx = None
    if reordered:
        g_idx = group_index(inputs, group).int()[torch.randperm(inputs)]
    scales = torch.rand(outputs, groups).half() + 0.01
    return QuantizedWeight(codes, scales, zeros, bits, symmetric, group, g_idx)


def same(a: QuantizedWeight, b: QuantizedWeight) -> None:
    for name in ("codes", "zeros"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.scales.float(), b.scales.float())
    assert (a.bits, a.group) == (b.bits, b.group)
    assert torch.equal(a.groups, b.groups)
    assert torch.equal(a.dequantize(), b.dequantize())


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize(("bits", "group", "symmetric", "shape"), CASES)
def test_round_trip(name, bits, group, symmetric, shape):
    q = some_weight(bits, group, symmetric, shape)
    layout = FORMATS[name]()
    tensors = layout.encode(q)
    assert set(tensors) <= set(layout.suffixes)
    same(q, layout.decode(tensors, spec_of(bits, group, symmetric)))


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_in_another_order(symmetric):
    """GPTQ files hold them; compressed-tensors files did once, and such files are read."""
    q = some_weight(4, 32, symmetric, (32, 96), reordered=True)
    same(q, FORMATS["gptq"]().decode(FORMATS["gptq"]().encode(q), spec_of(4, 32, symmetric)))
    layout = FORMATS["compressed-tensors"]()
    with pytest.raises(ExportError, match="g_idx"):
        layout.encode(q)
    tensors = {**layout.encode(replace(q, g_idx=None)), "weight_g_idx": q.g_idx}
    same(q, layout.decode(tensors, spec_of(4, 32, symmetric)))


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq"])
def test_the_config_says_what_each_layer_is(name):
    layout = FORMATS[name]()
    specs = {f"model.layers.{i}.mlp.up": spec_of(4 if i % 3 else 2, 64, True) for i in range(12)}
    config = layout.describe(specs, ["lm_head"], False)
    assert format_of(config).specs(config, list(specs)) == specs
    alike = {name: spec_of(3, -1, False) for name in specs}
    config = layout.describe(alike, ["lm_head"], False)
    assert format_of(config).specs(config, list(specs)) == alike


def test_unknown_formats_are_named():
    with pytest.raises(ConfigError, match="'awq' cannot be read; there are"):
        format_of({"quant_method": "awq"})
    with pytest.raises(ConfigError, match="pack-quantized"):
        FORMATS["compressed-tensors"]().specs({"format": "nvfp4-pack-quantized"}, [])
    with pytest.raises(ConfigError, match="group_size"):
        spec_of(4, 0, True)


# -- the GPTQ layout, spelled out ------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_fields_are_where_its_kernels_look(bits, version):
    q = some_weight(bits, 32, True, (32, 64))
    tensors = gptq_layout.encode(q, version)
    per, mask = 32 // bits, 2**bits - 1
    for o, i in [(0, 0), (5, 1), (31, 63), (17, 40)]:
        word = int(tensors["qweight"][i // per, o])
        zero = int(tensors["qzeros"][int(tensors["g_idx"][i]), o // per])
        code = (word >> (i % per * bits)) & mask
        stored = (zero >> (o % per * bits)) & mask
        value = (code - (stored + (version == 1))) * float(tensors["scales"][i // 32, o])
        assert value == pytest.approx(float(q.dequantize()[o, i]), rel=1e-6)


def test_version_1_refuses_what_its_readers_disagree_about():
    with pytest.raises(ExportError, match="version 1 cannot hold a zero point of 0"):
        gptq_layout.encode(some_weight(4, 32, False, (32, 64)), 1)


def test_a_file_of_another_version_is_read_by_its_config():
    q = some_weight(4, 32, True, (32, 64))
    layout = FORMATS["gptq"]()
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "checkpoint_format": "gptq_v2",
    }
    layout.specs(config, ["a"])
    same(q, layout.decode(gptq_layout.encode(q, 2), spec_of(4, 32, True)))


# -- compressed-tensors, against the package itself ------------------------------------------------------------
def test_old_compressed_tensors_files_with_whole_values_per_word():
    """3 bits: ten values in a word, two bits unused."""
    q = some_weight(3, 32, True, (6, 64))
    words = torch.zeros(6, 7, dtype=torch.int64)
    for i in range(64):
        words[:, i // 10] |= q.codes[:, i].long() << (i % 10 * 3)
    layout = FORMATS["compressed-tensors"]()
    tensors = {**layout.encode(q), "weight_packed": words.int()}
    same(q, layout.decode(tensors, spec_of(3, 32, True)))


FULL_GROUPS = [case for case in CASES if case[3] != (5, 7) and case[3][1] % (case[1] or 1) == 0]


@pytest.mark.parametrize(("bits", "group", "symmetric", "shape"), FULL_GROUPS)
def test_the_package_reads_what_we_write(bits, group, symmetric, shape):
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    q = some_weight(bits, group, symmetric, shape)
    args = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy="group" if group else "channel", group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = FORMATS["compressed-tensors"]().encode(q)
    weight = pack.PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    torch.testing.assert_close(
        weight.float(), q.dequantize(), rtol=2e-3, atol=1e-6
    )  # theirs is half precision


# -- the original's dicts --------------------------------------------------------------------------------------
@pytest.mark.parametrize("pack8", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("shape", [(32, 64), (48, 96), (8, 32), (6, 33)])
def test_legacy_round_trip(pack8, bits, group, shape):
    q = some_weight(bits, group, False, shape)
    tensors = legacy.encode(q, None, pack8)
    assert tensors["qweight"].dtype == (torch.int8 if pack8 else torch.int32)
    assert bits != 3 or len(tensors["qweight"]) % (12 if pack8 else 3) == 0
    assert tensors["scales"].shape == ((shape[0], 1) if group is None else (shape[0], q.scales.shape[1], 1))
    same(q, legacy.decode(tensors, bits, shape[1], group))


def test_pack8_rows_are_the_bytes_of_the_words_lowest_first():
    words = torch.tensor([[0x04030201, -1], [-2147483648, 0x7F80FF00]], dtype=torch.int32)
    rows = legacy.to_bytes(words)
    expected = [[1, -1], [2, -1], [3, -1], [4, -1], [0, 0], [0, -1], [0, -128], [-128, 127]]
    assert rows.tolist() == expected
    assert torch.equal(legacy.to_words(rows), words)


def test_legacy_3_bit_layout_is_the_one_of_its_kernel():
    """10 values, one split 2 + 1, 10 values, one split 1 + 2, 10 values in three words."""
    codes = torch.randint(0, 8, (1, 32))
    v = codes[0].tolist()
    first = sum(v[i] << (3 * i) for i in range(10)) | (v[10] & 3) << 30
    second = v[10] >> 2 | sum(v[11 + i] << (3 * i + 1) for i in range(10)) | (v[21] & 1) << 31
    third = v[21] >> 1 | sum(v[22 + i] << (3 * i + 2) for i in range(10))
    one = torch.ones(1, 1)
    q = QuantizedWeight(codes.to(torch.uint8), one, one.to(torch.uint8), 3, False)
    words = [w & 0xFFFFFFFF for w in legacy.encode(q)["qweight"][:, 0].tolist()]
    assert words == [first, second, third]
