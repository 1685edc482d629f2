"""Reconstruction of real weights, a short version; `benchmarks/adaround.py` has the whole table and MobileNetV2."""

from __future__ import annotations

import pytest

import adaround
import assets

pytestmark = [
    pytest.mark.assets,
    pytest.mark.slow,
    pytest.mark.skipif(bool(assets.MISSING), reason=assets.MISSING),
]
SHORT = ("W.QUANTIZER.ADAROUND.STEPS", 150)


def test_resnet20():
    """256 training images, all of the test set: W4A8 within 0.2 points of float, W3A8 within 1.0, W4A4 with the first
    and the last layer at 8 bits at least 89.0; files pass the certificate."""
    configs = adaround.cifar_configs()
    chosen = {name: configs[name].override(*SHORT) for name in ("W4A8", "W3A8", "W4A4, ends 8")}
    top1 = {name: value for name, value, _, _ in adaround.cifar(chosen, export=True)}
    assert top1.pop("float") == pytest.approx(91.73, abs=0.006)
    assert all(value >= adaround.BARS[name] for name, value in top1.items()), top1
