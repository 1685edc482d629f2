"""Where quantizers stand for onnxruntime: for each rule a small net, and the kernels that its file must get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit
from sparsebit.quantization import QuantModel

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from sparsebit.export.certificate.runtime import kernels


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Module:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Net(nn.Module):
    """`body` between a stem and a pooled head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.head = conv(3, 8, 3), nn.Linear(width, 5)

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.body(self.stem(x)), 1).flatten(1))


class Inception(Net):
    """Four readers of a concatenation, one of them behind a max pool."""

    def __init__(self) -> None:
        super().__init__(16)
        self.a, self.b, self.c, self.d = conv(8, 8), conv(8, 8, 3), conv(16, 8), conv(16, 8)

    def body(self, x: Tensor) -> Tensor:
        x = x.relu()
        x = torch.cat([self.a(x).relu(), self.b(F.max_pool2d(x, 3, 1, 1)).relu()], 1)
        return torch.cat([self.c(x).relu(), self.d(F.max_pool2d(x, 3, 1, 1)).relu()], 1)


class SqueezeExcite(Net):
    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.expand, self.out = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), conv(8, 8)

    def body(self, x: Tensor) -> Tensor:
        x = F.silu(x)
        gate = torch.sigmoid(self.expand(F.silu(self.reduce(F.adaptive_avg_pool2d(x, 1)))))
        return self.out(x * gate) + x


class SiluByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.out = conv(8, 8)

    def body(self, x: Tensor) -> Tensor:
        x = self.out(x * x.sigmoid())
        return x * torch.sigmoid(x)


class Shuffle(Net):
    """Halves, one of them through a branch, joined again and shuffled, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([conv(4, 4), conv(4, 4, 3, groups=4), conv(4, 4)])
        self.second = nn.ModuleList([conv(4, 4), conv(4, 4, 3, groups=4), conv(4, 4)])

    def block(self, x: Tensor, branch: nn.ModuleList) -> Tensor:
        kept, x = x.chunk(2, 1)
        x = torch.cat([kept, branch[2](branch[1](branch[0](x).relu())).relu()], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)

    def body(self, x: Tensor) -> Tensor:
        return self.block(self.block(x.relu(), self.first), self.second)


class PreActivation(Net):
    """One reader adds the value, another clips it first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(8, 8, 3), conv(8, 8, 3)

    def body(self, x: Tensor) -> Tensor:
        x = x + self.a(x.relu())
        return (x + self.b(x.relu())).relu()


class Dense(Net):
    """Values that go into several concatenations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(8, 8, 3), conv(16, 8, 3), conv(24, 8, 3)

    def body(self, x: Tensor) -> Tensor:
        x = x.relu()
        y = self.a(x).relu()
        z = self.b(torch.cat([x, y], 1)).relu()
        return self.c(torch.cat([x, y, z], 1)).relu()


class CheckedNorm(nn.BatchNorm2d):
    """timm's: a check of the rank, the norm, an identity, the activation in place."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        )
        return self.act(self.drop(x))


class NormWithActivation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(8, 8, 3, bias=False), CheckedNorm(8)

    def body(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x))


class SamePadding(nn.Conv2d):
    """Pads by the size of its input, as TensorFlow does."""

    def forward(self, x: Tensor) -> Tensor:
        pads = []
        for size, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1]):
            missing = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pads += [missing // 2, missing - missing // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class SameNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = (
            SamePadding(8, 8, 3, 2, bias=False),
            nn.BatchNorm2d(8),
            SamePadding(8, 8, 3),
        )

    def body(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x.relu())).relu()).relu()


class Twice(Net):
    """A convolution and its norm, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = conv(8, 8, 3)

    def body(self, x: Tensor) -> Tensor:
        return self.a(self.a(x.relu()).relu()).relu()


class HardGates(Net):
    """MobileNetV3: hardswish, and squeeze-excite with a hardsigmoid, as functions and as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.expand, self.out = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), conv(8, 8)
        self.act = nn.Hardswish()

    def body(self, x: Tensor) -> Tensor:
        x = F.hardswish(x)
        gate = F.hardsigmoid(self.expand(self.squeeze(x)))
        return self.act(self.out(x * gate))

    def squeeze(self, x: Tensor) -> Tensor:
        return self.reduce(F.adaptive_avg_pool2d(x, 1)).relu()


class Branches(Net):
    """RepVGG: a 3x3 and a 1x1 convolution with their norms, and a norm of the value itself, added."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = conv(8, 8, 3), conv(8, 8), nn.BatchNorm2d(8)

    def body(self, x: Tensor) -> Tensor:
        x = x.relu()
        return (self.a(x) + self.b(x) + self.norm(x)).relu()


class Pools(Net):
    """Average pools with windows, padded and not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(8, 8), conv(8, 8)

    def body(self, x: Tensor) -> Tensor:
        x = self.a(F.avg_pool2d(x.relu(), 2)).relu()
        return self.b(F.avg_pool2d(x, 3, 1, 1)).relu()


class ResizedToAnother(Net):
    """A resize to the size of another value: the file reads that size at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(8, 8, 3), conv(8, 8, 3, stride=2), conv(8, 8)

    def body(self, x: Tensor) -> Tensor:
        fine = self.a(x).relu()
        coarse = self.b(fine).relu()
        return self.c(fine + F.interpolate(coarse, fine.shape[-2:])).relu()


def trained(net: Callable[[], nn.Module]) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model, batches = net().train(), [torch.randn(4, 3, 16, 16) for _ in range(3)]
    with torch.no_grad():
        for batch in batches * 4:
            model(batch)
    return model.eval(), batches


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (Inception, {"QLinearConv": 5, "QLinearConcat": 2, "MaxPool": 2}),
        (SqueezeExcite, {"QLinearConv": 4, "QLinearSigmoid": 3, "QLinearMul": 3, "QLinearAdd": 1}),
        (SiluByHand, {"QLinearConv": 2, "QLinearSigmoid": 2, "QLinearMul": 2}),
        (Shuffle, {"QLinearConv": 7, "QLinearConcat": 2}),
        (PreActivation, {"QLinearConv": 3, "QLinearAdd": 2}),
        (Dense, {"QLinearConv": 4, "QLinearConcat": 2}),
        (NormWithActivation, {"QLinearConv": 2}),
        (SameNet, {"QLinearConv": 3}),
        (Twice, {"QLinearConv": 3}),
        # a hardsigmoid is a change of scale, which the runtime computes as a leaky relu of slope 1
        (HardGates, {"QLinearConv": 4, "QLinearLeakyRelu": 3, "QLinearMul": 3}),
        (Branches, {"QLinearConv": 2}),
        (Pools, {"QLinearConv": 5}),
        (ResizedToAnother, {"QLinearConv": 4, "QLinearAdd": 1, "Resize": 1}),
    ],
)
def test_every_op_is_integer(net, expected, tmp_path: Path) -> None:
    model, batches = trained(net)
    qmodel = sparsebit.quantize(model, batches, progress=False)
    report = qmodel.export_onnx(batches[0], str(tmp_path / "m.onnx"), ["x"], batches=batches[1:])
    integer, floating = kernels(tmp_path / "m.onnx")
    assert report.ok and not floating, report.why_float
    assert {op: integer[op] for op in expected} == expected
    with torch.no_grad():
        signal, noise = model(batches[0]), model(batches[0]) - qmodel(batches[0])
    assert signal.norm() > 30 * noise.norm()


def test_quantizers_of_one_value_have_one_grid() -> None:
    model, batches = trained(Inception)
    qmodel = sparsebit.quantize(model, batches, progress=False)
    direct, pooled = qmodel.model.c_0.input_quantizer, qmodel.model.d_0.input_quantizer
    assert direct.tied is pooled.tied and torch.equal(direct.scale, pooled.scale)


def test_an_identity_grid_of_a_joined_value_is_its_own() -> None:
    model, batches = trained(Dense)
    qmodel = sparsebit.quantize(model, batches, progress=False)
    scales = {float(q.scale) for q in (qmodel.model.a_0.input_quantizer, qmodel.model.c_0.input_quantizer)}
    assert len(scales) == 2


class Upsampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.up, self.out = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.up(self.a(x).relu()).relu())


def test_weights_of_float_kernels_are_stored_as_float(tmp_path: Path) -> None:
    import onnx

    torch.manual_seed(0)
    model, batches = Upsampler().eval(), [torch.randn(2, 3, 8, 8) for _ in range(2)]
    qmodel = sparsebit.quantize(model, batches, progress=False)
    report = qmodel.export_onnx(batches[0], str(tmp_path / "m.onnx"), ["x"])
    kinds = {t.name: t.data_type for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert kinds["a.weight_quantizer/codes"] == onnx.TensorProto.INT8
    assert kinds["up.weight_quantizer/DQ/out"] == onnx.TensorProto.FLOAT
    assert (
        kinds["out.weight_quantizer/codes/matrix"] == onnx.TensorProto.INT8
    )  # 1 x 1: integer with float output
    assert report.ok and not any("out" in layer for layer in report.why_float)
    assert sparsebit.verify(tmp_path / "m.onnx", qmodel, batches).ok


class NormBehindDepthwise(nn.Module):
    """ConvNeXt: a depthwise convolution reads codes of an integer one; a norm of tokens reads its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depthwise = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return self.head((y + x.permute(0, 2, 3, 1)).mean((1, 2)))


def test_a_float_convolution_has_its_bias_as_plain_numbers(tmp_path: Path) -> None:
    import onnx

    torch.manual_seed(0)
    model, batches = NormBehindDepthwise().eval(), [torch.randn(2, 3, 12, 12) for _ in range(2)]
    qmodel = sparsebit.quantize(model, batches, progress=False)
    report = qmodel.export_onnx(batches[0], str(tmp_path / "m.onnx"), ["x"], batches=batches[1:])
    graph = onnx.load(tmp_path / "m.onnx").graph
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    (depthwise,) = (n for n in graph.node if n.op_type == "Conv" and n.input[1] in stored)
    # the runtime's fast layout takes only constants
    bias = torch.tensor(stored[depthwise.input[2]])
    assert torch.allclose(bias, model.depthwise.bias, atol=0.01)  # its correction is small
    assert report.ok and sparsebit.verify(tmp_path / "m.onnx", qmodel, batches).ok


def test_a_file_of_weights_alone_keeps_its_codes(tmp_path: Path) -> None:
    import onnx

    model, batches = Upsampler().eval(), [torch.randn(2, 3, 8, 8)]
    qmodel = sparsebit.quantize(model, batches, "w8", progress=False)
    qmodel.export_onnx(batches[0], str(tmp_path / "m.onnx"), ["x"])
    kinds = {t.name: t.data_type for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert kinds["up.weight_quantizer/codes"] == onnx.TensorProto.INT8


def test_a_decision_on_sizes_is_checked() -> None:
    model, batches = trained(SameNet)
    qmodel = QuantModel(model, "w8a8", example=batches[0])
    assert not qmodel.islands
    assert torch.allclose(qmodel(batches[1]), model(batches[1]), atol=1e-5)


def test_a_pair_that_parts_is_not_folded() -> None:
    class Parted(Twice):
        def body(self, x: Tensor) -> Tensor:
            return self.a(self.a[0](x.relu()).relu()).relu()

    model, batches = trained(Parted)
    qmodel = QuantModel(model, "w8a8", example=batches[0])
    assert any("BatchNorm" in type(m).__name__ for m in qmodel.model.children())
    assert torch.allclose(qmodel(batches[1]), model(batches[1]), atol=1e-5)
