"""Training kernels: native, plain in pieces, and plain whole all compute the formula, bit for bit where it is exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebit.numeric import QParams, QuantSpec, fake_quantize, kernels

SHAPES = [
    ((3, 5, 7, 9), None),
    ((3, 5, 7, 9), 1),
    ((3, 5, 7, 9), 0),
    ((2, 40, 50, 60), None),
    ((2, 40, 50, 60), 1),
    ((90, 100, 3, 3), 0),
    ((40, 3000), 1),
    ((300, 400), 0),
    ((70000, 3), 1),
    ((6,), 0),
    ((1, 1), None),
]


@pytest.fixture(params=["native", "plain"])
def path(request):
    if request.param == "native" and kernels.native() is None:
        pytest.skip("no C compiler here, or SPARSEBIT_NATIVE=0")
    before = kernels._wanted
    kernels.use_native(request.param == "native")
    yield request.param
    kernels.use_native(before)


def formula(x: Tensor, g: Tensor, s: Tensor, z: Tensor, spec: QuantSpec) -> tuple[Tensor, ...]:
    """The definition in float64, from float32 codes: value, gradients of x, scale and zero point."""
    shape = [1] * x.dim()
    if spec.axis is not None:
        shape[spec.axis] = -1
    s, z = s.reshape(shape), z.reshape(shape)
    v = x / s
    r = v.round()
    c = torch.minimum(torch.maximum(r, spec.qmin - z), spec.qmax - z)
    inside = r == c
    over = [d for d in range(x.dim()) if d != spec.axis]
    total = lambda t: t.double().sum(over) if over else t.double()
    gs = total(g.double() * torch.where(inside, r.double() - x.double() / s.double(), c.double()))
    gz = total(torch.where(inside, 0.0, -g.double() * s.double()))
    return c * s, torch.where(inside, g, 0), gs.reshape(-1), gz.reshape(-1)


@pytest.mark.parametrize("shape, axis", SHAPES)
@pytest.mark.parametrize("layout", ["dense", "channels_last", "strided", "expanded gradient"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_value_and_gradients(path, shape, axis, layout, symmetric):
    torch.manual_seed(len(shape))
    x, g = torch.randn(shape) * 2, torch.randn(shape)
    if layout == "channels_last" and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    elif layout == "expanded gradient":
        g = torch.tensor(0.5).expand(shape)
    spec = QuantSpec(4, symmetric, axis)
    channels = 1 if axis is None else shape[axis]
    s = torch.rand(channels) * 0.2 + 0.2
    z = torch.zeros(channels) if symmetric else torch.randint(0, 15, (channels,)).float()
    want = formula(x, g, s, z, spec)
    x, s, z = (t.requires_grad_() for t in (x.detach(), s, z))
    y = fake_quantize(x, QParams(s, z), spec, grad_scale=0.5)
    y.backward(g)
    assert torch.equal(y, want[0]) and torch.equal(x.grad, want[1])
    for got, expected in ((s.grad, want[2]), (z.grad, want[3])):
        torch.testing.assert_close(got.double(), expected * 0.5, rtol=1e-4, atol=2e-3)


def test_half_precision_empty_nan_and_infinity(path):
    one, zero = torch.tensor([0.25]).requires_grad_(), torch.zeros(1)
    x = torch.randn(300).bfloat16().requires_grad_()
    fake_quantize(x, QParams(one, zero), QuantSpec(4)).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and bool(one.grad.isfinite().all())
    empty = torch.empty(0, 3, requires_grad=True)
    fake_quantize(empty, QParams(one, zero), QuantSpec(4)).sum().backward()
    assert empty.grad.shape == (0, 3)
    big = torch.full((2**17,), float("inf")).requires_grad_()
    one.grad = None
    fake_quantize(big, QParams(one, zero), QuantSpec(4)).sum().backward()
    assert not big.grad.any() and one.grad.item() == 7 * 2**17
    bad = torch.tensor([float("nan"), 1.0]).requires_grad_()
    y = fake_quantize(bad, QParams(one, zero), QuantSpec(4))
    assert y[0].isnan() and y[1] == 1


def test_sums_do_not_depend_on_the_number_of_threads():
    if kernels.native() is None:
        pytest.skip("no C compiler here, or SPARSEBIT_NATIVE=0")
    torch.manual_seed(0)
    x, g, found = torch.randn(4, 16, 64, 64), torch.randn(4, 16, 64, 64), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            s = torch.full((16,), 0.3).requires_grad_()
            fake_quantize(x, QParams(s, torch.zeros(16)), QuantSpec(4, True, 1)).backward(g)
            found.append(s.grad)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_broken_compiler_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "cc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert kernels._load.__wrapped__() is None
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_nothing_is_built_on_import(tmp_path):
    import os
    import subprocess
    import sys

    code = "import sparsebit, sparsebit.quantization.quant_model"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    assert not list(tmp_path.rglob("*.so"))
