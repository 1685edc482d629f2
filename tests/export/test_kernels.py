"""The certificate holds on the parts of real nets, and onnxruntime finds every integer kernel it has for them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from exported_once import export_once
from torch import Tensor, nn

import sparsebit
from models import Attention, images, small_net
from sparsebit import QuantConfig
from sparsebit.export.certificate.runtime import kernels

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def certified(net: nn.Module, data: list[Tensor], path, config="w8a8", **options):
    torch.manual_seed(0)
    qmodel = sparsebit.quantize(net.eval(), data, config)
    report = qmodel.export_onnx(data[0], str(path / "m.onnx"), batches=data, **options)
    assert report.ok and sum(c.wrong for c in report.certificate.quantizers.values()) == 0
    assert report.certificate.runtime.noise_db < -35
    return qmodel, report


class Between(nn.Module):
    """Each op between two convolutions, which are integer only if everything in between is quantized."""

    def __init__(self, **ops: nn.Module) -> None:
        super().__init__()
        self.ops = nn.ModuleDict(ops)
        self.before = nn.ModuleDict({name: nn.Conv2d(3, 4, 3, padding=1) for name in ops})
        self.after = nn.ModuleDict({name: nn.Conv2d(4, 3, 1) for name in ops})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: self.after[name](op(self.before[name](x))) for name, op in self.ops.items()}


class Cat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), F.relu(self.b(x))], 1)


def test_ops_that_have_integer_kernels(tmp_path):
    net = Between(
        relu=nn.ReLU(),
        relu6=nn.ReLU6(),
        maxpool=nn.MaxPool2d(2),
        avgpool=nn.AvgPool2d(2),
        global_pool=nn.AdaptiveAvgPool2d(1),
        nearest=nn.Upsample(scale_factor=2),
        shuffle=nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
        cat=Cat(),
        softmax=nn.Softmax(1),
        leaky=nn.LeakyReLU(0.1),
        sigmoid=nn.Sigmoid(),
    )
    _, report = certified(net, [torch.randn(2, 3, 8, 8) * 3 for _ in range(3)], tmp_path)
    found = Counter(report.integer)
    last = len(net.ops)  # their output is an output of the model, in float: a convolution of 1 x 1 gives that
    # softmax stays float, and so does the convolution in front of it
    # the average pool is a depthwise convolution in the file
    assert found["QLinearConv"] == last + 2 and report.floating.get("Conv", 0) == 1
    assert found["QGemm"] == last
    assert found["QLinearGlobalAveragePool"] == 1
    assert found["MaxPool"] == found["Resize"] == report.floating["Softmax"] == 1
    assert found["QLinearLeakyRelu"] == found["QLinearSigmoid"] == 1
    assert found["QLinearConcat"] + found["Concat"] == 1
    assert set(report.floating) <= {"Conv", "FusedConv", "Softmax"}
    others = [why for name, why in report.why_float.items() if "softmax" not in name.lower()]
    assert all("is an output of the model" in why for why in others)


def test_ops_without_integer_kernels_are_right_and_named(tmp_path):
    net = Between(
        bilinear=nn.Upsample(scale_factor=2, mode="bilinear"),
        transposed=nn.ConvTranspose2d(4, 4, 2, stride=2),
        norm=nn.GroupNorm(2, 4),
    )
    _, report = certified(net, [torch.randn(2, 3, 8, 8) for _ in range(3)], tmp_path)
    assert report.floating["ConvTranspose"] == 1
    assert (
        report.why_float["ops.transposed (ConvTranspose)"]
        == "onnxruntime has no integer kernel for ConvTranspose"
    )


SMOOTH = {  # module, its op in the file, its name in the reason
    "tanh": (nn.Tanh(), "Tanh", "Tanh"),
    "gelu": (nn.GELU(), "Erf", "GELU"),
}


def test_a_convolution_in_front_of_a_float_activation_is_integer(tmp_path):
    """onnxruntime has no integer kernel for these: they are computed in float, as few kernels, and said to be."""
    net = Between(**{name: module for name, (module, _, _) in SMOOTH.items()})
    _, report = certified(net, [torch.randn(2, 3, 8, 8) * 2 for _ in range(3)], tmp_path)
    assert report.integer["QLinearConv"] == len(SMOOTH)
    kernels = {"Tanh": 1, "Gelu": 1}
    assert report.floating == kernels
    assert report.integer["QGemm"] == len(SMOOTH)  # the last of each, 1 x 1: their output is the model's
    for name, (_, op, reason) in SMOOTH.items():
        assert report.why_float[f"ops.{name} ({op})"] == f"onnxruntime has no integer kernel for {reason}"


KEPT = [  # backend, weight bits, activation bits -> does LeakyReLU behind a convolution keep its quantizer?
    ("onnxruntime", 8, 8, True),
    ("onnxruntime", 5, 8, True),
    ("onnxruntime", 4, 8, False),  # 4-bit weights run in float: rounding the output would only cost accuracy
    ("onnxruntime", 8, 4, False),  # so would a 4-bit grid in front of every activation
    ("virtual", 8, 8, False),
    ("openvino", 8, 8, False),
]


@pytest.mark.parametrize("backend, w, a, kept", KEPT)
def test_where_an_activation_keeps_its_quantizer(backend, w, a, kept):
    config = QuantConfig.load("w8a8").override(
        *("BACKEND", backend, "W.QUANTIZER.BIT", w, "A.QUANTIZER.BIT", a)
    )
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 1), nn.LeakyReLU(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16, 4), nn.LeakyReLU(), nn.Linear(4, 4)),
    )
    model = sparsebit.QuantModel(net, config).model
    assert model._1.input_quantizer.absorbed is not kept
    assert model._3.input_quantizer.absorbed  # a clip is part of the convolution
    assert model._6.input_quantizer.absorbed  # a Linear is integer with float output, too


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("scheme", ["per-tensor-affine", "per-tensor-symmetric"])
def test_a_residual_net_is_all_integer(scheme, bits, tmp_path, monkeypatch):
    """Also with signed activations, where ReLU is not a part of the grid, and below 8 bits."""
    export_once(monkeypatch, "residual")
    config = QuantConfig.load("w8a8").override(
        *("A.QADD.ENABLE_QUANT", True, "A.QSCHEME", scheme, "A.QUANTIZER.BIT", bits)
    )
    _, report = certified(small_net(), images(), tmp_path, config)
    assert report.integer == {"QLinearConv": 6, "QLinearAdd": 2, "QGemm": 1}  # the pool is a convolution
    assert not report.floating and not report.why_float and report.opset == 18


class Mobile(nn.Module):
    """ReLU6 between convolutions that `equalize` balances: each channel gets an upper bound of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.project, self.fc = nn.Conv2d(8, 6, 1), nn.Linear(6, 5)
        with torch.no_grad():
            self.expand.weight *= torch.logspace(-1, 1, 8).view(-1, 1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(F.relu6(self.depthwise(F.relu6(self.expand(x)))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_relu6_with_a_bound_per_channel(tmp_path):
    torch.manual_seed(0)
    qmodel, report = certified(Mobile(), [torch.randn(4, 3, 8, 8) * 4 for _ in range(3)], tmp_path)
    caps = [m.cap for m in qmodel.modules() if getattr(m, "cap", None) is not None]
    assert caps and caps[0].unique().numel() > 1  # equalize did something
    assert report.integer["QLinearConv"] == 3 and report.integer["QGemm"] == 1, report.why_float


class Block(nn.Module):
    """A transformer block with its embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.attention, self.norm = Attention(), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.attention(self.embedding(words))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x[:, 0])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_transformer_block(bits, tmp_path, monkeypatch):
    export_once(monkeypatch, "transformer")
    config = QuantConfig.load("w8a8").override("W.QUANTIZER.BIT", bits)
    data = [torch.randint(20, (3, 7)) for _ in range(4)]
    _, report = certified(Block(), data, tmp_path, config, dynamic_axes={"words": {0: "batch", 1: "length"}})
    if bits == 8:
        products = sum(
            n for op, n in report.integer.items() if op.startswith(("QGemm", "MatMulI", "QLinearMatMul"))
        )
        assert products == 7  # qkv, q @ k, attention @ v, proj, up, down, head
        assert not {"MatMul", "Gemm", "FusedMatMul"} & set(report.floating)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.up1, self.mix = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = F.leaky_relu(self.down2(F.max_pool2d(a, 1)), 0.1)
        x = F.relu(self.mix(torch.cat([self.up1(b), a], 1)))
        return self.head(F.interpolate(x, scale_factor=2.0, mode="bilinear"))


@pytest.mark.parametrize("preset", ["w8a8", "w4a4", "w8"])
def test_a_unet(preset, tmp_path, monkeypatch):
    export_once(monkeypatch, f"unet-{'a' in preset}")
    certified(UNet(), [torch.randn(2, 3, 8, 8) for _ in range(3)], tmp_path, preset)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = (
            nn.Embedding(20, 8),
            nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True),
        )
        self.head = nn.Linear(12, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0])


def test_an_lstm(tmp_path):
    data = [torch.randint(20, (3, 7)) for _ in range(4)]
    _, report = certified(Tagger(), data, tmp_path)
    assert any("no integer kernel for LSTM" in why for why in report.why_float.values())


def test_a_layer_with_many_outputs_is_integer(tmp_path):
    """torch's exporter leaves the sum of a long bias and its correction to the runtime."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 9000)).eval()
    batches = [torch.randn(4, 16) for _ in range(3)]
    qmodel = sparsebit.quantize(model, batches, progress=False)
    report = qmodel.export_onnx(batches[0], str(tmp_path / "m.onnx"), ["x"], batches=batches[1:])
    integer, floating = kernels(tmp_path / "m.onnx")
    assert report.ok and integer == {"QGemm": 2} and not floating
