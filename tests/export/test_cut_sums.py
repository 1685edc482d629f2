"""x86 without VNNI cuts sums of products at 16 bits. By the pair rule files are exact there, in a plain session."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import sparsebit
from sparsebit import QuantConfig
from sparsebit.errors import ExportError
from sparsebit.export.kernels import integer_kernels, why_float
from sparsebit.export.kernels.wrong_kernels import WRONG_KERNELS, cuts_sums, is_wrong
from sparsebit.numeric.pair_sums import breaks_rule
from sparsebit.quantization.converters.fuse_operations import softmax_in_float

pytest.importorskip("onnxruntime")
INFO = Path("/proc/cpuinfo")
WITHOUT = QuantConfig.load("w8a8").override("W.PAIR_RULE", False)


class Twice(nn.Module):
    """Convolutions whose sums are large: all inputs and most weights are positive. The last is called twice."""

    def __init__(self, shared: bool = False):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, padding=1)
        self.between = self.last if shared else nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.depthwise, self.fc = nn.Conv2d(16, 16, 3, groups=16), nn.Linear(16, 5)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.uniform_(module.weight, 0.0, 0.1)

    def forward(self, x):
        return self.fc(self.depthwise(self.last(self.between(self.first(x)))).mean((2, 3)))


BATCHES = [torch.rand(4, 3, 10, 10, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def quantized(config=None, shared: bool = False):
    torch.manual_seed(0)
    config = QuantConfig.load("w8a8" if config is None else config)
    config = config.override("SCHEDULE.WHOLLY_FLOAT", False)  # groups of 8 channels follow the rule, too
    return sparsebit.quantize(Twice(shared).eval(), BATCHES, config)


def stored_weights(path: Path) -> dict[str, torch.Tensor]:
    tensors = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(path)).graph.initializer}
    return {k: torch.from_numpy(v.copy()) for k, v in tensors.items() if v.dtype == "int8" and v.ndim > 1}


@pytest.mark.skipif(not INFO.exists() or "avx2" not in INFO.read_text(), reason="knows x86 on Linux")
def test_the_probe_says_what_the_cpu_says():
    assert cuts_sums() == (not {"avx512_vnni", "avx_vnni"} & set(INFO.read_text().split()))


@pytest.mark.parametrize("shared", [False, True])
def test_the_file_is_exact_in_a_plain_session(shared, tmp_path):
    report = quantized(shared=shared).export_onnx(BATCHES[0], str(tmp_path / "m.onnx"), batches=BATCHES[1:])
    assert report.certificate.runtime.noise_db < -90
    assert "weights" in report.pair_rule and "dB" in report.pair_rule and "pair rule" in str(report)


def test_the_weights_of_the_file_keep_the_rule(tmp_path):
    def broken(config) -> int:
        qmodel = quantized(config)
        path = tmp_path / "m.onnx"
        if config is WITHOUT and cuts_sums():
            return 1
        qmodel.export_onnx(BATCHES[0], str(path))
        weights = stored_weights(path)
        assert len(weights) == 5
        in_pairs = [w.T if w.shape == (16, 5) else w for w in weights.values() if w.shape[1] > 1]
        return sum(int(breaks_rule(w)) for w in in_pairs)

    assert broken(None) == 0
    assert broken(WITHOUT) > 0


def test_which_layers_have_the_rule():
    model = quantized().model
    rules = {
        n: getattr(model, n).weight_quantizer.keeps_pairs
        for n in ("first", "between", "last", "depthwise", "fc")
    }
    assert rules == {"first": True, "between": True, "last": True, "depthwise": False, "fc": True}


@pytest.mark.parametrize("config", ["w8", "w4a8", "w8a8-tensorrt"])
def test_where_sums_cannot_be_cut_there_is_no_rule(config):
    model = quantized(config).model
    assert not any(getattr(model, n).weight_quantizer.keeps_pairs for n in ("first", "last", "fc"))


def test_the_model_computes_with_the_weights_of_the_rule():
    """Simulation, bias correction and file have the same weights."""
    conv = quantized().model.first
    codes = conv.quantized_weight() / conv.weight_quantizer.scale.reshape(-1, 1, 1, 1)
    assert int(breaks_rule(codes.round())) == 0


def test_set_bit_back_to_8_fits_the_scale_again():
    quantizer = quantized().model.first.weight_quantizer
    fitted = quantizer.scale.clone()
    quantizer.set_bit(4)
    assert not quantizer.keeps_pairs
    quantizer.set_bit(8)
    torch.testing.assert_close(quantizer.scale, fitted)


def test_learned_scales_and_rounding_keep_the_rule():
    for kind in ("lsq", "dorefa", "adaround"):
        config = QuantConfig.load("w8a8").override("W.QUANTIZER.TYPE", kind)
        qmodel = sparsebit.QuantModel(Twice().eval(), config).calibrate(BATCHES)
        if kind == "adaround":
            qmodel.reconstruct(BATCHES, progress=False)
        qmodel.set_quant(True, True)
        qmodel.train()
        qmodel(BATCHES[0]).sum().backward()
        conv = qmodel.model.last
        assert conv.weight.grad is not None or kind == "adaround"
        scale = conv.weight_quantizer.current_qparams().scale
        codes = conv.weight_quantizer.rounded(conv.weight).detach() / scale.reshape(-1, 1, 1, 1)
        assert int(breaks_rule(codes.round())) == 0, kind


def test_without_the_rule_a_cpu_that_cuts_sums_refuses_the_file(tmp_path):
    qmodel = quantized(WITHOUT)
    if not cuts_sums():
        assert "VNNI" in qmodel.export_onnx(BATCHES[0], str(tmp_path / "m.onnx")).pair_rule
        return
    with pytest.raises(ExportError, match="QLinearConv"):
        qmodel.export_onnx(BATCHES[0], str(tmp_path / "m.onnx"))


def test_the_table_of_wrong_kernels_names_what_it_avoids():
    for entry in WRONG_KERNELS:
        assert entry.what and entry.avoided and entry.seen_in
        assert is_wrong(entry.kernel.split(", ")[0]) == (entry.depends_on_cpu or entry.probe())


class BoxHead(nn.Module):
    """The end of YOLOv8: a distribution over 16 distances, softmax over their axis, then a 1x1 convolution."""

    def __init__(self, axis: int):
        super().__init__()
        self.axis = axis
        self.stem, self.dfl = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(16, 1, 1, bias=False)
        self.dfl.weight.data.copy_(torch.arange(16.0).reshape(1, 16, 1, 1))

    def forward(self, x):
        n, _, h, w = x.shape
        spread = self.stem(x).reshape(n, 4, 16, h * w)
        bins = spread.transpose(1, 2) if self.axis == 1 else spread.permute(0, 3, 1, 2)
        bins = bins.softmax(self.axis)
        bins = bins if self.axis == 1 else bins.permute(0, 3, 2, 1)
        return {"boxes": self.dfl(bins).reshape(n, 4, -1), "scores": self.stem(x).mean(1)}


@pytest.mark.parametrize("axis", [1, -1])
def test_small_probabilities_are_right_in_the_file(axis, tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    model = BoxHead(axis).eval()
    qmodel = sparsebit.quantize(model, batches)
    report = qmodel.export_onnx(batches[0], str(tmp_path / "m.onnx"), batches=batches[1:])
    assert set(report.certificate.runtime.outputs) == {"boxes", "scores"}  # the keys of the dict
    assert report.certificate.runtime.outputs["boxes"].noise_db < -60
    assert not report.integer["QLinearSoftmax"]


@pytest.mark.skipif(not is_wrong("QLinearSoftmax"), reason="this onnxruntime computes it rightly")
@pytest.mark.parametrize("axis", [1, -1])
def test_a_wrong_kernel_is_named_as_the_first_tensor(axis, tmp_path, monkeypatch):
    """Placed as if the kernel were right: the plain session refuses the file, and says where it starts."""
    for module in (integer_kernels, why_float, softmax_in_float):
        monkeypatch.setattr(module, "is_wrong", lambda kernel: False)
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    qmodel = sparsebit.quantize(BoxHead(axis).eval(), batches)
    with pytest.raises(ExportError, match=r"it starts at \S+ \(QLinearSoftmax\)"):
        qmodel.export_onnx(batches[0], str(tmp_path / "m.onnx"), batches=batches[1:])
    assert (tmp_path / "m.failed.onnx").exists() and not (tmp_path / "m.onnx").exists()
