"""The grid of probabilities: onnxruntime's integer softmax cuts 1 / scale off to a whole number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from sparsebit.numeric import with_whole_inverse


def test_the_scale_is_one_over_a_whole_number():
    scale = torch.cat([torch.rand(5000) * 0.02 + 1e-5, 1 / torch.arange(1, 3000).float()])
    found = with_whole_inverse(scale)
    inverse = 1 / found  # in float32, as the kernel computes it
    assert ((inverse - inverse.floor()) / inverse <= 2e-7).all()  # cutting it off loses nothing
    assert (found / scale >= 1 - 1e-6).all()  # nothing saturates that did not before
    steps = (1 / scale).floor()
    assert (found / scale <= (steps + 1) / steps + 1e-5).all()  # and no more than one step is given away


class Probabilities(nn.Module):
    """The largest probability is what the test sets: a scale of 1/255, of more and of less."""

    def forward(self, scores: Tensor, values: Tensor) -> Tensor:
        return scores.softmax(-1) @ values


@pytest.mark.parametrize("spread", [0.2, 2.0, 30.0])
def test_the_integer_softmax_gives_the_codes_of_the_model(spread, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    batches = [(torch.randn(4, 17, 17) * spread, torch.randn(4, 17, 8)) for _ in range(3)]
    qmodel = sparsebit.quantize(Probabilities(), batches, progress=False)
    report = qmodel.export_onnx(batches[0], str(tmp_path / "net.onnx"), batches=batches[1:])
    assert report.integer["QLinearSoftmax"] == 1
    # without the whole number: -44 to -59 dB
    assert report.certificate.runtime.noise_db < -90, str(report)
