"""Certificates of whole networks: the file, as onnxruntime runs it, against the model, judged by the noise floor.

ResNet-20 and MobileNetV2 have their real weights and images, MiniLM its real weights where the package is installed;
the others are realistic in shape, with random weights.
"""

from __future__ import annotations

from typing import Any

import architectures
import pytest
import torch
from torch import Tensor, nn

import assets
import calibration
import sparsebit
from models import randomise

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.slow
needs_assets = pytest.mark.skipif(bool(assets.MISSING), reason=assets.MISSING)


def certify(
    net: nn.Module,
    known: list[Any],
    dummy: Any,
    batches: list[Any],
    path: Any,
    record: Any,
    names: tuple[str, ...] = ("x",),
    config: Any = None,
) -> Any:
    """Quantize on `known`, export, compare on `dummy` and `batches`; what every network must show."""
    qmodel = sparsebit.quantize(net.eval(), known, config, progress=False)
    axes = {name: {0: "batch"} for name in names}
    file = str(path / "net.onnx")
    report = qmodel.export_onnx(dummy, file, list(names), dynamic_axes=axes, batches=batches)
    runtime, floor = report.certificate.runtime, report.certificate.floor
    size = report.bytes / sum(4 * p.numel() for p in net.parameters())
    record("labels", f"{runtime.labels_differ} of {runtime.labels} differ, noise floor {floor.labels_differ}")
    record("noise_db", f"{runtime.noise_db:.1f}, noise floor {floor.noise_db:.1f}")
    record("size", f"{size:.3f} of the float weights")
    assert report.ok and sum(q.wrong for q in report.certificate.quantizers.values()) == 0
    one_draw = report.certificate.floors[0].labels_differ  # the highest of three would be an easier bar
    assert runtime.labels > 0 and runtime.labels_differ <= one_draw, str(report)
    assert not report.notes
    return report


@pytest.mark.assets
@needs_assets
def test_resnet20(tmp_path, record_property):
    """At least 99.7 % of the labels; measured on 2,000 of the test images."""
    known = list(assets.cifar10("train20k", 256)[0].split(32))
    x = assets.cifar10("test", 2000)[0]
    report = certify(assets.cifar_resnet(20), known, x[:8], list(x[8:].split(166)), tmp_path, record_property)
    labels = report.certificate.runtime
    assert labels.labels == 2000 and labels.labels_differ <= 0.003 * 2000, str(report)
    assert report.integer["QLinearConv"] == 20 and "Conv" not in report.floating, report.why_float


@pytest.mark.assets
@needs_assets
def test_mobilenet_v2(tmp_path, record_property):
    """The labels of 750 images that it was not calibrated on; 15 differ (98.0 %) where this was written, floor 20."""
    pytest.importorskip("PIL", reason="pillow reads the images")
    images, x, _ = assets.split_imagenet()
    batches, known = list(x[2:].split(44)), list(images.split(25))
    config = sparsebit.QuantConfig.load("w8a8").override(
        "W.OBSERVER.TYPE", "mse", "A.OBSERVER.MEAN_MINMAX.MIN_VALUES", 1
    )
    report = certify(assets.mobilenet_v2(), known, x[:2], batches, tmp_path, record_property, config=config)
    labels = report.certificate.runtime
    assert labels.labels == 750 and labels.labels_differ <= 0.02 * 750, str(report)
    assert report.floating == {"Conv": 1} and list(report.why_float) == [
        "features.0.0 (Conv)"
    ]  # the first one
    assert report.integer["QLinearConv"] == 51 and report.integer["QLinearAdd"] == 10


def noise(n: int, *shape: int) -> list[Tensor]:
    """Smooth noise: like images, neighbouring pixels are alike."""
    g = torch.Generator().manual_seed(1)
    coarse = [torch.randn(shape[0], 3, shape[-2] // 4, shape[-1] // 4, generator=g) for _ in range(n)]
    return [nn.functional.interpolate(x, scale_factor=4.0, mode="bilinear") for x in coarse]


def test_resnet18(tmp_path, record_property):
    data = noise(6, 8, 3, 64, 64)
    report = certify(
        randomise(calibration.resnet18()), data[:3], data[3], data[4:], tmp_path, record_property
    )
    assert not report.floating and report.integer["QLinearConv"] == 20 and report.integer["QLinearAdd"] == 8
    assert report.bytes <= 0.27 * 4 * sum(p.numel() for p in calibration.resnet18().parameters())


def test_vit(tmp_path, record_property):
    torch.manual_seed(0)
    data = noise(12, 16, 3, 32, 32)
    report = certify(architectures.ViT(), data[:3], data[3], data[4:], tmp_path, record_property)
    assert not {"MatMul", "FusedMatMul", "Gemm"} & set(report.floating), report.why_float


def test_unet(tmp_path, record_property):
    data = noise(4, 4, 3, 32, 32)
    net = randomise(architectures.UNet())
    report = certify(net, data[:2], data[2], data[3:], tmp_path, record_property)
    # float: the head; the skip connections and the pools read the convolutions on one grid
    assert report.integer["QLinearConv"] == 10 and report.floating["ConvTranspose"] == 1, report.why_float


def test_lstm(tmp_path, record_property):
    data = [torch.randint(500, (8, 20)) for _ in range(6)]
    net = architectures.Tagger()
    report = certify(net, data[:3], data[3], data[4:], tmp_path, record_property, ("words",))
    assert any("no integer kernel for LSTM" in why for why in report.why_float.values())


def sentences() -> list[str]:
    """Of STS-B where it is there, else made up."""
    file = assets.ASSETS / "stsb" / "sts-dev.tsv"
    if file.is_file():
        return [line.split("\t")[5] for line in file.read_text("utf-8").splitlines()[:96]]
    people, things = ("a man", "the woman", "two dogs", "some children"), ("ball", "guitar", "street", "boat")
    return [f"{a} near the {b}, {c}." for a in people for b in things for c in (*people, *things)][:96]


def test_bert(tmp_path, record_property):
    """MiniLM with its real weights, or (where they are not installed) a smaller BERT with random ones."""
    folder = architectures.minilm_folder()
    if folder is not None:
        net = architectures.minilm(folder)
        ids, present = architectures.word_ids(sentences(), (folder / "vocab.txt").read_text("utf-8").split())
    else:
        net = architectures.Bert(words=1000, dim=96, depth=4, heads=4)
        words = sorted({w for s in sentences() for w in s.lower().split()})[:990]
        ids, present = architectures.word_ids(sentences(), ["[PAD]", "[CLS]", "[SEP]", *words])
    record_property("weights", "random" if folder is None else "real")
    batches = [{"ids": i, "present": p} for i, p in zip(ids.split(16), present.split(16))]
    names = ("ids", "present")
    report = certify(net, batches[:3], batches[3], batches[4:], tmp_path, record_property, names)
    assert not {"MatMul", "FusedMatMul", "Gemm"} & set(report.floating), report.why_float
