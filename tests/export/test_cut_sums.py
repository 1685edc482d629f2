"""CPUs without VNNI: onnxruntime cuts sums of uint8 x int8 products there; certificates say so and name the option."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.export import runtime

pytest.importorskip("onnxruntime")
INFO = Path("/proc/cpuinfo")


class Twice(nn.Module):
    """Convolutions whose sums are large: all inputs and most weights are positive. The last is called twice."""

    def __init__(self, shared: bool):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, padding=1)
        self.between = self.last if shared else nn.Conv2d(16, 16, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.uniform_(module.weight, 0.0, 0.1)

    def forward(self, x):
        return self.last(self.between(self.first(x))).mean((2, 3))


def report_of(shared: bool, tmp_path):
    torch.manual_seed(0)
    batches = [torch.rand(4, 3, 10, 10) for _ in range(3)]
    qmodel = sparsebit.quantize(Twice(shared).eval(), batches)
    return qmodel.export_onnx(batches[0], str(tmp_path / "m.onnx"), batches=batches[1:])


@pytest.mark.skipif(not INFO.exists() or "avx2" not in INFO.read_text(), reason="knows x86 on Linux")
def test_what_is_measured_is_what_the_cpu_says():
    assert runtime.saturates() == (not {"avx512_vnni", "avx_vnni"} & set(INFO.read_text().split()))


def test_the_file_agrees_with_the_model_on_any_cpu(tmp_path):
    certificate = report_of(False, tmp_path).certificate
    assert certificate.runtime.noise_db < -90
    assert (certificate.cut_sums is not None) == runtime.saturates()


def test_a_cpu_that_cuts_sums_is_named_in_the_report(tmp_path):
    report = report_of(False, tmp_path)
    notes = [note for note in report.notes if "no VNNI" in note and runtime.EXACT_SUMS in note]
    assert bool(notes) == runtime.saturates()
    assert ("cut_sums" in report.as_dict()) == runtime.saturates()


def test_weights_that_two_layers_share_are_run_all_the_same(tmp_path):
    assert report_of(True, tmp_path).ok
