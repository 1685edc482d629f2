"""A short version of benchmarks/qat_cifar.py: some steps of W3A3 training on real images bring most of it back."""

from __future__ import annotations

import pytest

import assets
import qat_cifar

pytestmark = [
    pytest.mark.assets,
    pytest.mark.slow,
    pytest.mark.skipif(bool(assets.MISSING), reason=assets.MISSING),
]


def test_w3a3_recovers(record_property):
    net = assets.cifar_resnet(20)
    x, y = assets.cifar10("train20k", 5000)
    test_x, test_y = assets.cifar10("test", 2000)
    top1 = lambda model: assets.top1(assets.logits(model, test_x), test_y)
    qmodel = qat_cifar.build("lsq W3A3", net, x)
    before = top1(qmodel)
    qat_cifar.train(qmodel, net, x, y, epochs=1, steps=60, bits=3)
    after = top1(qmodel)
    record_property("top1", f"calibrated {before:.2f}, after 60 steps {after:.2f}, float {top1(net):.2f}")
    assert after > before + 3
    assert after > top1(net) - 5
