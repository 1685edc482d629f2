"""QuantLinear: the native kernels, torch's int4 kernel and the plain product compute the same; what training keeps."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparsebit.errors import SparsebitError
from sparsebit.llm.layers import kernels
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.numeric import kernels as switch
from sparsebit.numeric.quantized_weight import QuantizedWeight


@pytest.fixture(params=["native", "plain"])
def kind(request):
    if request.param == "native" and kernels._load() is None:
        pytest.skip("no C compiler here")
    before = switch._wanted
    switch.use_native(request.param == "native")
    yield request.param
    switch.use_native(before)


def weight(bits, group, shape=(24, 96), dtype=torch.float16, seed=0) -> QuantizedWeight:
    """Random codes, zeros anywhere, scales of different sizes; the boundary codes are there."""
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = shape
    codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    codes[0, 0], codes[-1, -1] = 2**bits - 1, 0
    groups = -(-inputs // (group or inputs))
    scales = (torch.rand(outputs, groups, generator=generator) * 4 - 8).exp().to(dtype)
    zeros = torch.randint(0, 2**bits, (outputs, groups), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(codes, scales, zeros, bits, symmetric=False, group=group)


@pytest.mark.parametrize("scale", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "group", [16, 32, 64, 8, None]
)  # 64: the last group is shorter; 8: not for the kernel
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_against_the_formula(kind, bits, group, scale):
    q = weight(bits, group, dtype=scale)
    layer = QuantLinear(q, torch.linspace(-1, 1, 24))
    if kind == "native":
        assert (layer._find_native() is None) == (group == 8)
    index = torch.arange(96) // (group or 96)
    expected = (q.codes.double() - q.zeros.double()[:, index]) * q.scales.double()[:, index]
    assert torch.equal(layer.dequantize(torch.float32).double(), expected.float().double())
    assert torch.equal(layer.dequantize(torch.bfloat16), expected.float().bfloat16())
    for rows in (1, 2, 3, 5, 8, 9, 40):
        x = torch.randn(rows, 96)
        exact = x.double() @ expected.T + layer.bias.double()
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]), outputs=st.integers(1, 9), chunks=st.integers(1, 40),
    group=st.sampled_from([None, 16, 48, 128, 272]), rows=st.integers(1, 8), seed=st.integers(0, 99),
)  # fmt: skip
def test_native_product_of_any_shape(bits, outputs, chunks, group, rows, seed):
    q = weight(bits, group, (outputs, 16 * chunks), torch.float32, seed)
    layer = QuantLinear(q)
    if layer._find_native() is None:
        return
    x = torch.randn(rows, 16 * chunks, generator=torch.Generator().manual_seed(seed))
    terms = x.double()[:, None] * q.dequantize().double()
    error = (layer(x) - terms.sum(-1)).abs()
    assert bool((error <= 1e-6 * terms.abs().sum(-1) + 1e-12).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_and_shapes(kind, dtype):
    q = weight(4, 32, (32, 96))
    layer = QuantLinear(q, torch.randn(32), dtype)
    for shape in ((96,), (1, 96), (2, 1, 96), (2, 9, 96), (0, 96)):
        x = torch.randn(shape, dtype=dtype)
        out = layer(x)
        assert out.dtype == dtype and out.shape == (*shape[:-1], 32)
        expected = F.linear(x.double(), q.dequantize().double(), layer.bias.double())
        top = float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02 * top)
    strided = torch.randn(96, 3, dtype=dtype).T
    torch.testing.assert_close(layer(strided), layer(strided.contiguous()), rtol=0, atol=0)


def test_a_row_does_not_depend_on_the_others_or_on_the_threads():
    if kernels._load() is None:
        pytest.skip("no C compiler here")
    layer, x = QuantLinear(weight(3, 64, (1024, 512))), torch.randn(7, 512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = layer(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(two, torch.cat([layer(row[None]) for row in x]))


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("bits", [3, 4])
def test_the_gradient_goes_to_the_input_and_nothing_is_kept(kind, bits, rows):
    q = weight(bits, 32)
    layer, reference = QuantLinear(q, torch.randn(24)), q.dequantize()
    kept = []
    x, g = torch.randn(rows, 96, requires_grad=True), torch.randn(rows, 24)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(x)
    assert (
        not kept
    )  # a float copy of the weight here would be the whole model by the time of the backward pass
    out.backward(g)
    torch.testing.assert_close(x.grad, g @ reference, rtol=1e-4, atol=1e-5)
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("scale", [torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pieces_make_the_whole(monkeypatch, dtype, scale):
    """Many rows: the weight is dequantized a few outputs at a time, the last piece is shorter."""
    monkeypatch.setattr(kernels, "PIECE", 96 * 5)
    q = weight(3, 32, dtype=scale)
    layer, exact = QuantLinear(q, torch.randn(24), dtype), q.dequantize().double()
    x, g = torch.randn(3, 7, 96, dtype=dtype, requires_grad=True), torch.randn(3, 7, 24, dtype=dtype)
    out = layer(x)
    out.backward(g)
    assert out.dtype == x.grad.dtype == dtype
    close = {"rtol": 0.03, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(out.double(), F.linear(x.double(), exact, layer.bias.double()), **close)
    torch.testing.assert_close(x.grad.double(), g.double() @ exact, **close)


def test_autocast(kind):
    layer, x = QuantLinear(weight(4, 32), torch.randn(24)), torch.randn(3, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x.bfloat16()).float())
    out.sum().backward()
    assert x.grad.dtype == torch.float32


def test_dtype_moves_keep_the_grid(kind):
    layer = QuantLinear(weight(4, 32), torch.randn(24))
    before = layer.dequantize(torch.float32)
    layer(torch.randn(1, 96))
    moved = nn.Sequential(layer).to(torch.bfloat16)[0]
    assert moved.dtype == moved.weight.dtype == moved.bias.dtype == torch.bfloat16
    assert moved.scales.dtype == torch.float16 and torch.equal(moved.dequantize(torch.float32), before)


def test_copies_and_new_tensors_are_seen(kind):
    layer, x = QuantLinear(weight(4, 32)), torch.randn(1, 96)
    out = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), out)
    other.scales = other.scales * 2
    if kind == "native":  # torch's int4 kernel has a packed copy
        torch.testing.assert_close(other(x), 2 * out)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), out)


def test_the_float_weight_cannot_be_written():
    layer = QuantLinear(weight(4, 32))
    with pytest.raises(SparsebitError, match=r"qlora\.merge"):
        layer.weight.data += 1
    assert isinstance(layer.weight + 0, torch.Tensor) and type(layer.weight + 0) is torch.Tensor


def test_reordered_groups(kind):
    torch.manual_seed(0)
    q = weight(4, 32)
    q = QuantizedWeight(q.codes, q.scales, q.zeros, 4, False, 32, torch.randperm(96) // 32)
    x = torch.randn(2, 96)
    torch.testing.assert_close(QuantLinear(q)(x), x @ q.dequantize().T, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compiled(kind):
    layer, x = QuantLinear(weight(4, 32)), torch.randn(2, 96)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=2e-2, atol=2e-2)


def test_nothing_is_built_on_import(tmp_path):
    code = "import sys, sparsebit.llm, sparsebit.llm.training.qlora\n"
    code += "print([m for m in ('peft', 'triton') if m in sys.modules])"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "[]" and not list(tmp_path.rglob("*.so"))


def test_a_broken_compiler_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "cc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert kernels._load.__wrapped__() is None
