"""BatchNorms are folded into, and activations computed with, the layer before them, of every kind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models import randomise, sqnr
from sparsebit.quantization import QuantModel

FOLDED = [
    (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (2, 4, 9)),
    (nn.Conv3d(4, 6, 2, groups=2, bias=False), nn.BatchNorm3d(6), (2, 4, 4, 5, 6)),
    (nn.ConvTranspose1d(4, 6, 3, groups=2), nn.BatchNorm1d(6), (2, 4, 9)),
    (nn.ConvTranspose3d(4, 6, 2), nn.BatchNorm3d(6), (2, 4, 3, 3, 3)),
    (nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 5)), nn.BatchNorm1d(5), (3, 3, 4)),
    (nn.Conv2d(4, 6, 1), nn.SyncBatchNorm(6), (2, 4, 3, 3)),
]


@pytest.mark.parametrize("layer, norm, shape", FOLDED, ids=lambda v: type(v).__name__)
def test_fuse_bn_folds_into_every_kind_of_layer(layer, norm, shape):
    net, x = nn.Sequential(layer, norm, nn.Hardswish()).eval(), torch.randn(shape)
    with torch.no_grad():
        for value in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            value.uniform_(0.5, 2)
    want = net(x)
    qmodel = QuantModel(net, {"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}}, check=(x,))
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in qmodel.model.modules())
    torch.testing.assert_close(qmodel(x), want, rtol=1e-4, atol=1e-5)
    assert qmodel.model._2.input_quantizer.absorbed
    qmodel.calibrate([x])
    qmodel.set_quant(True, True)
    assert sqnr(want, qmodel(x)) > 25


@pytest.mark.parametrize(
    "net, shape",
    [
        (
            nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)),
            (2, 5, 4),
        ),  # tokens: the norm works on their axis
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(5)), (2, 5, 4)),
        (nn.Sequential(nn.Flatten(2), nn.Linear(4, 3), nn.BatchNorm1d(3)), (2, 3, 2, 2)),
        (nn.Sequential(nn.Conv1d(4, 6, 1), nn.BatchNorm1d(7)), (4, 7)),  # an unbatched signal
    ],
)
def test_fuse_bn_declines_where_the_axes_may_differ(net, shape):
    net, x = randomise(net), torch.randn(shape)
    qmodel = QuantModel(net, {"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}}, check=(x,))
    assert any(isinstance(m, nn.BatchNorm1d) for m in qmodel.model.modules())
    torch.testing.assert_close(qmodel(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "act", [nn.ReLU(), nn.ReLU6(), nn.Hardswish(), nn.PReLU(), nn.ELU(), nn.SiLU(), nn.Hardtanh()]
)
@pytest.mark.parametrize(
    "layer", [nn.Conv1d(4, 4, 1), nn.Conv3d(4, 4, 1), nn.ConvTranspose1d(4, 4, 1), nn.Linear(4, 4)]
)
def test_activations_are_computed_with_the_layer_before_them(layer, act):
    qmodel = QuantModel(nn.Sequential(layer, act, copy.deepcopy(act)), {"BACKEND": "virtual"})
    assert qmodel.model._1.input_quantizer.absorbed and not qmodel.model._2.input_quantizer.absorbed
