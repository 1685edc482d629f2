"""A layer norm that a forward writes out becomes one nn.LayerNorm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.quantization import QuantModel
from sparsebit.quantization.converters.whole_norms import whole_norms
from sparsebit.quantization.modules.normalization import QLayerNorm


class Written(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("eps", torch.tensor(1e-5))
        self.register_buffer("two", torch.tensor(2.0))
        self.weight, self.bias = nn.Parameter(torch.rand(12) + 0.5), nn.Parameter(torch.randn(12))

    def forward(self, x):
        x = self.first(x)
        centred = x - x.mean(-1, keepdim=True)
        if self.kind == "onnx":
            variance = torch.pow(centred, self.two).mean(dim=[-1], keepdim=True)
            x = torch.div(centred, torch.sqrt(variance + self.eps)) * self.weight + self.bias
        elif self.kind == "rsqrt":
            variance = (centred * centred).mean(-1, keepdim=True)
            x = self.weight * (centred * torch.rsqrt(variance + 1e-6))
        elif self.kind == "other axis":
            variance = centred.square().mean(1, keepdim=True)
            x = centred / torch.sqrt(variance + 1e-6) * self.weight
        elif self.kind == "no scale":
            x = centred / (centred.square().mean(-1, keepdim=True) + 1e-6) ** 0.5
        return self.last(x)


@pytest.mark.parametrize("kind, found", [("onnx", 1), ("rsqrt", 1), ("other axis", 0), ("no scale", 0)])
def test_what_is_a_layer_norm(kind, found):
    model = Written(kind).eval()
    gm = torch.fx.symbolic_trace(model)
    assert whole_norms(gm) == found
    gm.graph.eliminate_dead_code()
    gm.recompile()
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(gm(x), model(x), rtol=1e-5, atol=1e-5)


def test_it_is_quantized_like_any_other_layer_norm(tmp_path):
    model, x = Written("onnx").eval(), torch.randn(3, 5, 8)
    qmodel = QuantModel(model, check=(x,)).calibrate([x], progress=False)
    assert sum(isinstance(module, QLayerNorm) for module in qmodel.model.modules()) == 1
    qmodel.set_quant(True, True)
    assert qmodel.export_onnx(x, str(tmp_path / "m.onnx")).ok
