"""Fake quantization against the plain formula, torch's own op, and finite differences."""

import numpy as np
import pytest
import torch

from sparsebit.errors import ConfigError
from sparsebit.numeric import (
    QParams,
    QuantSpec,
    dequantize,
    fake_quantize,
    qparams_from_minmax,
    quantize_to_int,
)


def reference(x, scale, zero_point, spec):
    """QuantizeLinear and DequantizeLinear of the ONNX standard, in numpy: divide, half to even, saturate."""
    shape = [1] * x.ndim
    if spec.axis is not None:
        shape[spec.axis] = -1
    s, z = scale.reshape(shape).astype(np.float32), zero_point.reshape(shape)
    q = np.clip(np.rint(x / s) + z, spec.qmin, spec.qmax)
    return ((q - z) * s).astype(np.float32), q


SPECS = [
    QuantSpec(bits, symmetric, axis, narrow)
    for bits in (2, 4, 8, 16)
    for symmetric in (True, False)
    for axis in (None, 0, 1)
    for narrow in ((False, True) if symmetric else (False,))
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equals_onnx_arithmetic_bit_for_bit(spec):
    x = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0)) * 3
    rows = x if spec.axis is None else x.movedim(spec.axis, 0)
    flat = rows.reshape(1 if spec.axis is None else rows.shape[0], -1)
    qp = qparams_from_minmax(flat.amin(1) * 0.7, flat.amax(1) * 0.7, spec)  # 0.7: some values saturate
    want, codes = reference(x.numpy(), qp.scale.numpy(), qp.zero_point.numpy(), spec)
    assert np.array_equal(fake_quantize(x, qp, spec).numpy(), want)
    assert np.array_equal(quantize_to_int(x, qp, spec).numpy(), codes)
    assert np.array_equal(dequantize(torch.tensor(codes), qp, spec).numpy(), want)


@pytest.mark.parametrize("n", [0, 1, 1000, 2**18, 2**18 + 1, 3 * 2**18 + 17])
def test_chunks_change_nothing(n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    spec = QuantSpec(8, False)
    qp = QParams(torch.tensor([0.02]), torch.tensor([100.0]))
    want, _ = reference(x.numpy(), qp.scale.numpy(), qp.zero_point.numpy(), spec)
    assert np.array_equal(fake_quantize(x, qp, spec).numpy(), want)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8, 64, 40, 40).to(memory_format=torch.channels_last),
        lambda: torch.randn(40, 8, 64, 40).permute(1, 2, 0, 3),
        lambda: torch.randn(1024, 1024)[:, ::3],
        lambda: torch.randn(1, 512, 800).expand(3, 512, 800),
        lambda: torch.tensor(0.3),
    ],
)
def test_any_memory_layout(make):
    torch.manual_seed(0)
    x, spec = make(), QuantSpec(8, False)
    qp = QParams(torch.tensor([0.02]), torch.tensor([100.0]))
    before = x.clone()
    want = torch.fake_quantize_per_tensor_affine(x.contiguous(), 0.02, 100, 0, 255)
    torch.testing.assert_close(fake_quantize(x, qp, spec), want, rtol=0, atol=1e-6)
    assert torch.equal(x, before)  # the input is never written to


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype):
    x, spec = torch.randn(4, 5).to(dtype), QuantSpec(4, True, 0)
    qp = qparams_from_minmax(x.float().amin(1), x.float().amax(1), spec)
    y = fake_quantize(x, qp, spec)
    assert y.dtype == dtype
    torch.testing.assert_close(y, fake_quantize(x.float(), qp, spec).to(dtype))


def test_nan_stays_nan_and_inf_saturates():
    spec, qp = QuantSpec(8, True), QParams(torch.tensor([0.1]), torch.tensor([0.0]))
    y = fake_quantize(torch.tensor([float("nan"), float("inf"), -float("inf")]), qp, spec)
    assert y[0].isnan() and y[1:].tolist() == pytest.approx([12.7, -12.8])


@pytest.mark.parametrize("spec", [s for s in SPECS if s.bits in (2, 4)], ids=str)
def test_gradients_against_finite_differences(spec):
    """x: 1 inside, 0 outside. Scale and zero point: differences of the straight-through function, whose rounding
    residual is held constant."""
    g = torch.Generator().manual_seed(1)
    x = (torch.randn(4, 3, 6, generator=g, dtype=torch.float64) * 2).requires_grad_()
    channels = 1 if spec.axis is None else x.shape[spec.axis]
    scale = (torch.rand(channels, generator=g, dtype=torch.float64) + 0.5).requires_grad_()
    zero = torch.full((channels,), 0.0 if spec.symmetric else 1.0, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(x.shape, generator=g, dtype=torch.float64)
    (fake_quantize(x, QParams(scale, zero), spec) * weight).sum().backward()

    shape = [1] * 3
    if spec.axis is not None:
        shape[spec.axis] = -1
    v = (x / scale.reshape(shape)).detach()
    residual, zp = v.round() - v, zero.detach().round().reshape(shape)
    inside = (v.round() >= spec.qmin - zp) & (v.round() <= spec.qmax - zp)

    def smooth(x, s, z):
        s, z = s.reshape(shape), z.reshape(shape)
        u = x / s + residual
        return (
            torch.where(inside, u, torch.where(v > 0, spec.qmax - z, spec.qmin - z)).mul(s).mul(weight).sum()
        )

    args = [x.detach(), scale.detach(), zero.detach()]
    for i, grad in enumerate((x.grad, scale.grad, zero.grad)):
        for index in np.ndindex(*args[i].shape):
            up, down = [a.clone() for a in args], [a.clone() for a in args]
            up[i][index] += 1e-6
            down[i][index] -= 1e-6
            want = (smooth(*up) - smooth(*down)) / 2e-6
            assert grad[index].item() == pytest.approx(want.item(), abs=1e-5)


def test_no_graph_is_kept_without_grad():
    x = torch.randn(4, requires_grad=True)
    with torch.no_grad():
        assert fake_quantize(x, QParams(torch.ones(1), torch.zeros(1)), QuantSpec()).grad_fn is None


@pytest.mark.parametrize("symmetric", [True, False])
def test_range_always_holds_zero_and_empty_ranges_are_harmless(symmetric):
    spec = QuantSpec(8, symmetric)
    for lo, hi in ((2.0, 5.0), (-5.0, -2.0), (0.0, 0.0), (-1e-20, 1e-20), (-1.0, 3.0)):
        qp = qparams_from_minmax(torch.tensor(lo), torch.tensor(hi), spec)
        assert qp.scale.item() > 0 and spec.qmin <= qp.zero_point.item() <= spec.qmax
        assert fake_quantize(torch.zeros(1), qp, spec).item() == 0
        y = fake_quantize(torch.tensor([lo, hi]), qp, spec)
        assert (y - torch.tensor([lo, hi])).abs().max() <= qp.scale.item() * 0.5001


def test_bits_are_checked():
    for bits in (0, 17, -1):
        with pytest.raises(ConfigError, match="between 1 and 16"):
            QuantSpec(bits)
