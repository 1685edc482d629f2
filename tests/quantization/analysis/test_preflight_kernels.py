"""What pre-flight announces as integer is integer in the optimised graph of the exported file, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit
from kernel_counts import announced, computed
from models import Attention, small_net
from sparsebit import QuantConfig
from sparsebit.export.kernels.integer_kernels import WRONG
from sparsebit.quantization.analysis.preflight import preflight
from sparsebit.quantization.converters.constants import WHY_FLOAT, on_constants
from sparsebit.quantization.modules import QuantOpr

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def conv(cin: int, cout: int, size: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(cin, cout, size, padding=size // 2, bias=False, **options), nn.BatchNorm2d(cout)
    )


class Residual(nn.Module):
    """body(x) + shortcut(x), and an activation behind the sum or none."""

    def __init__(
        self, body: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut or nn.Identity(), act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.shortcut(x))


def head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels, 5)]


def resnet() -> nn.Module:
    """A stem with a max-pool, and basic blocks, one of them with a convolution as its shortcut."""
    block = lambda a, b, s: nn.Sequential(conv(a, b, stride=s), nn.ReLU(), conv(b, b))
    return nn.Sequential(
        *(conv(3, 8, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        Residual(block(8, 8, 1), act=nn.ReLU(inplace=True)),
        Residual(block(8, 16, 2), conv(8, 16, 1, stride=2), nn.ReLU(inplace=True)),
        *head(16),
    )


class TimmBlock(nn.Module):
    """As timm writes it: a place for DropBlock in front of an activation that works in place, and `x += shortcut`."""

    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.conv1, self.drop_block, self.act1 = conv(cin, cout), nn.Identity(), nn.ReLU(inplace=True)
        self.aa, self.conv2, self.act2 = nn.Identity(), conv(cout, cout), nn.ReLU(inplace=True)
        self.downsample = conv(cin, cout, 1) if cin != cout else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.conv2(self.aa(self.act1(self.drop_block(self.conv1(x)))))
        x += shortcut
        return self.act2(x)


def timm_resnet() -> nn.Module:
    stem = [conv(3, 8, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, TimmBlock(8, 8), TimmBlock(8, 16), *head(16))


def bottleneck() -> nn.Module:
    body = [conv(8, 4, 1), nn.ReLU(), conv(4, 4, groups=2), nn.ReLU(), conv(4, 8, 1)]
    return nn.Sequential(conv(3, 8), nn.ReLU(), Residual(nn.Sequential(*body), act=nn.ReLU()), *head(8))


def inverted_residual() -> nn.Module:
    body = [conv(8, 24, 1), nn.ReLU6(), conv(24, 24, groups=24), nn.ReLU6(), conv(24, 8, 1)]
    return nn.Sequential(
        conv(3, 8), nn.ReLU6(), Residual(nn.Sequential(*body)), conv(8, 16, 1), nn.ReLU6(), *head(16)
    )


class Dense(nn.Module):
    """Each layer reads everything before it, behind a norm that is not a part of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = conv(3, 8), nn.AvgPool2d(2)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1))
            for i in range(3)
        )
        self.fc = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        found = [F.relu(self.stem(x))]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.fc(self.pool(torch.cat(found, 1)).mean((2, 3)))


class SqueezeExcite(nn.Module):
    def __init__(self, gate: Callable[[Tensor], Tensor] = torch.sigmoid) -> None:
        super().__init__()
        self.conv, self.down, self.up = conv(8, 8), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        s = self.up(F.relu(self.down(x.mean((2, 3), keepdim=True))))
        return x * self.gate(s)


def silu_net() -> nn.Module:
    body = [conv(8, 8), nn.SiLU(), conv(8, 8), nn.SiLU()]
    return nn.Sequential(conv(3, 8), nn.SiLU(), Residual(nn.Sequential(*body)), *head(8))


class UNet(nn.Module):
    def __init__(self, mode: str = "nearest") -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = conv(3, 4), conv(4, 8), conv(8, 8), conv(12, 4)
        self.mode, self.out = mode, nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        b = F.relu(self.c(F.relu(self.b(F.max_pool2d(a, 2)))))
        up = F.interpolate(b, scale_factor=2.0, mode=self.mode)
        return self.out(F.relu(self.d(torch.cat([up, a], 1))))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.attention, self.norm = nn.Conv2d(3, 16, 4, 4), Attention(), nn.LayerNorm(16)
        self.position = nn.Parameter(torch.randn(1, 9, 16))
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        x = self.attention(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


class WithOutputs(nn.Module):
    """Convolutions whose output is an output of the model, read by someone else too, or read in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = conv(3, 4), conv(4, 4), conv(4, 4), conv(4, 4)

    def forward(self, x: Tensor) -> Any:
        a = F.relu(self.a(x))
        b = self.b(a)
        c = self.c(torch.sigmoid(b)) + self.d(a)
        return b, F.relu(c), torch.flatten(self.d(F.leaky_relu(c)), 1).softmax(-1)


class Attend(nn.Module):
    """Both forms of attention that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(12, 2, batch_first=True), nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


class SharedMove(nn.Module):
    """Two layers read a moved value: one directly, one behind another move."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.move = nn.Conv2d(3, 4, 3, padding=1), move
        channels = move(torch.zeros(1, 4, 12, 12)).shape[1]
        self.a, self.b = nn.Conv2d(channels, 2, 1), nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.move(self.conv(x))
        return self.a(x), self.b(x.permute(0, 1, 3, 2))


class Branches(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> list[Any]:
        return [branch(x) for branch in self.branches]


def moved_twice() -> nn.Module:
    """onnxruntime moves a quantizer in front of these by itself: every first convolution is integer."""
    moves: list[Callable[[Tensor], Tensor]] = [
        *(lambda x: F.max_pool2d(x, 2), lambda x: x.flatten(2).unflatten(2, (9, 16)), lambda x: x[:, :3]),
        *(lambda x: x.unsqueeze(2).squeeze(2), lambda x: x.flip(3), lambda x: x),
    ]
    return Branches(*map(SharedMove, moves))


def moved_once() -> nn.Module:
    """Only the exporter moves a quantizer in front of these, and only one: every first convolution is float."""
    moves: list[Callable[[Tensor], Tensor]] = [
        *(
            lambda x: F.pixel_shuffle(x, 2),
            lambda x: F.interpolate(x, scale_factor=2.0),
            lambda x: x.roll(1, 2),
        ),
        *(lambda x: torch.cat([x, x], 1), lambda x: x.chunk(2, 1)[0], lambda x: x[:, 1].unsqueeze(1)),
    ]
    return Branches(*map(SharedMove, moves))


class Shuffled(nn.Module):
    """The end of a stage of ShuffleNet: two parts, their channels mixed, and two convolutions that read the result."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = conv(3, 8), conv(8, 8, 1), conv(8, 8, 1)
        self.first, self.second, self.last = conv(16, 8), conv(16, 8, 1), nn.Sequential(*head(16))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = torch.cat([F.relu(self.left(x)), F.relu(self.right(x))], 1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
        return self.last(torch.cat([F.relu(self.first(x)), F.relu(self.second(x))], 1))


def audio() -> nn.Module:
    layers = [nn.Conv1d(3, 8, 5, stride=2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(8, 8, 3)]
    return nn.Sequential(*layers, nn.LeakyReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Dropout(), nn.Linear(16, 4))
    )


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Between(nn.Module):
    """Each op between two convolutions; the output of the second is an output of the model."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Conv2d(3, 4, 3, padding=1) for _ in functions)
        self.between = nn.ModuleList(f if isinstance(f, nn.Module) else Apply(f) for f in functions)
        channels = [f(torch.zeros(1, 4, 12, 12)).shape[1] for f in functions]
        self.after = nn.ModuleList(nn.Conv2d(n, 3, 1) for n in channels)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [c(b(a(x))) for a, b, c in zip(self.before, self.between, self.after)]


def moved() -> nn.Module:
    """The quantizer of the second convolution moves in front of all of these: the first one is integer."""
    return Between(
        *(nn.ReLU6(), nn.Hardtanh(), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2), nn.Upsample(scale_factor=2)),
        *(nn.PixelShuffle(2), nn.ChannelShuffle(2), lambda x: F.relu(F.max_pool2d(F.relu(x), 2))),
        *(lambda x: x.clamp(-1, 1), lambda x: x.clamp(min=0), lambda x: x.flip(3), lambda x: x.roll(1, 2)),
        *(lambda x: x.permute(0, 1, 3, 2), lambda x: x.reshape(x.shape[0], x.size(1), -1, 4)),
        *(lambda x: x[:, :2], lambda x: x.chunk(2, 1)[0], lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
        *(lambda x: torch.stack([x, x], 2).flatten(1, 2), lambda x: x.unsqueeze(1).squeeze(1)),
        *(lambda x: torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2]], 1), lambda x: x.contiguous().float()),
        *(lambda x: torch.cat([x, torch.zeros_like(x)], 1), lambda x: x.repeat_interleave(2, 1)),
        *(lambda x: x.narrow(1, 0, 2), lambda x: x[:, :1].expand(-1, 4, -1, -1)),
        *(nn.ReflectionPad2d(1), nn.ReplicationPad2d(2), nn.CircularPad2d(1), nn.ZeroPad2d(-1)),
        *(lambda x: F.pad(x, (1, 1)), lambda x: F.pad(x, (0, 0, 0, 0, 2, 1)), lambda x: x.to(x.dtype)),
        lambda x: torch.constant_pad_nd(x, (0, 0, 0, 0, 0, 3)),
    )


class Constants(nn.Module):
    """Layers that read a buffer, a parameter or positions, as relative positions do; one reads a value, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(16, 16, 4))
        self.query = nn.Parameter(torch.randn(1, 1, 16))
        self.bias = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
        self.position, self.shared = nn.Linear(6, 16), nn.Linear(16, 16)
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=torch.float32).unsqueeze(-1).expand(-1, 6).to(x.device)
        x = self.first(x) + self.position(places) + self.shared(self.query)
        return self.last(self.shared(x)) + self.bias(self.table).mean((0, 1))


class Products(nn.Module):
    """Contractions that add something: the product is integer all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        a, b = self.a(x), self.b(x)
        square = a @ b.transpose(1, 2)
        added = [torch.baddbmm(square, a, b.mT, beta=0.5, alpha=2.0), torch.addbmm(square[0], a, b.mT)]
        return [*added, torch.addmv(square[0, 0], a[0], b[0, 0]), torch.linalg.vecdot(a, b)]


def stopped() -> nn.Module:
    """The quantizer stays behind these: the first convolution is float."""
    return Between(
        *(
            nn.Threshold(0.1, 0.0),
            nn.AdaptiveMaxPool2d(1),
            nn.ConstantPad2d(1, 0.5),
            nn.Softmax(1),
            nn.GroupNorm(1, 4),
        ),
        *(lambda x: x.repeat(1, 2, 1, 1), lambda x: x[:, [1, 0, 3, 2]], lambda x: x * 2, lambda x: x + 1),
        *(lambda x: x.masked_fill(x > 1, 0.0), lambda x: x.sum(1, keepdim=True)),
        lambda x: torch.cat([x, F.relu(x)], 1),
    )


IMAGES, SERIES, VECTORS = (4, 3, 12, 12), (4, 3, 40), (8, 12)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small_net": (small_net, IMAGES),
    "resnet": (resnet, IMAGES),
    "timm_resnet": (timm_resnet, IMAGES),
    "bottleneck": (bottleneck, IMAGES),
    "inverted_residual": (inverted_residual, IMAGES),
    "dense": (Dense, IMAGES),
    "squeeze_excite": (
        lambda: nn.Sequential(conv(3, 8), nn.ReLU(), SqueezeExcite(), conv(8, 4), *head(4)),
        IMAGES,
    ),
    "hard_gate": (
        lambda: nn.Sequential(conv(3, 8), nn.Hardswish(), SqueezeExcite(F.hardsigmoid), conv(8, 4), *head(4)),
        IMAGES,
    ),
    "silu": (silu_net, IMAGES),
    "unet": (UNet, IMAGES),
    "unet_bilinear": (lambda: UNet("bilinear"), IMAGES),
    "vit": (ViT, IMAGES),
    "outputs": (WithOutputs, IMAGES),
    "attention": (Attend, (2, 5, 12)),
    "shuffled": (Shuffled, IMAGES),
    "moved": (moved, IMAGES),
    "moved_twice": (moved_twice, IMAGES),
    "moved_once": (moved_once, IMAGES),
    "stopped": (stopped, IMAGES),
    "constants": (Constants, (2, 5, 12)),
    "products": (Products, (2, 5, 12)),
    "audio": (audio, SERIES),
    "mlp": (mlp, VECTORS),
}
CASES = [(name, "w8a8", ()) for name in NETS]
CASES += [
    ("resnet", "w8a8", ("A.QADD.ENABLE_QUANT", False)),
    ("resnet", "w8a8", ("W.QUANTIZER.BIT", 7)),
    ("silu", "w8a8", ("W.QUANTIZER.BIT", 5)),
    ("resnet", "w8a8", ("A.QUANTIZER.BIT", 4)),
    ("silu", "w8a8", ("A.QUANTIZER.BIT", 6)),
    ("vit", "w8a8", ("W.QUANTIZER.BIT", 6)),
    ("resnet", "w8a8", ("A.QSCHEME", "per-tensor-symmetric")),
    ("resnet", "w4a8", ()),
    ("vit", "w4a8", ()),
    ("mlp", "w8a8", ("W.GROUP", 4)),
    ("resnet", "w8a8", ("A.SPECIFIC", [{"_3_body_0_0": ["QUANTIZER.DISABLE", True]}])),
]


@pytest.mark.parametrize(
    ("net", "preset", "changes"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v))
)
def test_announced_is_computed(net, preset, changes, tmp_path):
    torch.manual_seed(0)
    build, shape = NETS[net]
    data = [torch.randn(shape) for _ in range(2)]
    config = QuantConfig.load(preset).override(*changes)
    qmodel = sparsebit.QuantModel(build().eval(), config)
    before = preflight(qmodel, data[0])
    qmodel.calibrate(data)
    qmodel.set_quant(w_quant=True, a_quant=True)
    found = preflight(qmodel, data[0])
    report = qmodel.export_onnx(data[0], str(tmp_path / "m.onnx"))
    if "unet" not in net:  # whether the two quantizers that read its skip become one depends on the data
        assert announced(before) == announced(found)
    assert announced(found) == computed(report), f"{found}\n{report.integer} {report.floating}"


def test_softmax_is_announced_as_float():
    qmodel = sparsebit.QuantModel(ViT().eval(), "w8a8")
    (row,) = [row for row in preflight(qmodel).rows if row.op == "Softmax"]
    assert (row.state, row.how, row.integer) == ("float", WRONG, False)


def test_two_grids_of_one_value_are_named():
    config = QuantConfig.load("w8a8").override("A.SPECIFIC", [{"d*": ["QUANTIZER.BIT", 6]}])
    rows = {row.path: row for row in preflight(sparsebit.QuantModel(UNet().eval(), config)).rows}
    assert rows["a.0"].backend == "its readers quantize it in different ways"


def test_what_reads_only_constants_stays_float():
    """A layer is quantized all the same if one of its calls reads values; the other call is told apart."""
    qmodel = sparsebit.QuantModel(Constants().eval(), "w8a8", example=torch.randn(2, 5, 12))
    found = preflight(qmodel, torch.randn(2, 5, 12))
    rows = {row.path if row.path != "shared" else row.name: row for row in found.rows}
    for path in ("position", "bias.0", "bias.1", "bias.2"):
        assert (rows[path].state, rows[path].how, rows[path].macs) == ("float", WHY_FLOAT, 0)
        assert not any(isinstance(m, QuantOpr) and path in n for n, m in qmodel.model.named_modules())
    assert rows["shared"].state == "float" and rows["shared_1"].integer
    assert found.totals["macs"] == found.totals["integer_macs"] == 10 * (12 * 16 + 16 * 16 + 16 * 8)


def test_what_is_written_into_is_no_constant():
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            table = torch.zeros_like(x)
            table[0] = x[0]
            return self.layer(table)

    qmodel = sparsebit.QuantModel(Writing().eval(), "w8a8", example=torch.randn(3, 12))
    assert not qmodel.islands and isinstance(qmodel.model.layer, QuantOpr)


@pytest.mark.parametrize(
    "create", [torch.randn_like, torch.zeros_like, lambda x: torch.tensor(x[0, 0].item())]
)
def test_random_numbers_are_no_constants(create):
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sum(-1, keepdim=True) + self.layer(create(x) + torch.zeros(1, 12))

    node = next(
        n for n in sparsebit.QuantModel(Noisy().eval(), "w8a8").model.graph.nodes if n.name == "layer_1"
    )
    constants = {n.name for n in on_constants(node.graph.owning_module)}
    assert ("layer_1" in constants) == (create is not torch.randn_like)
