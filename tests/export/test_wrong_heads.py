"""Wrong files of detectors, taggers, pairs, encoders and sound: refused with the right first tensor.

Also what is quiet in an output: parts that are small beside the rest, and few pixels of a map of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit
from sparsebit import QuantModel

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
from onnx import helper, numpy_helper  # noqa: E402

Model = Any  # onnx.ModelProto
Change = Callable[[Model], object]


class Boxes(nn.Module):
    """Two levels with two anchors each: boxes in pixels, and three scores, in one output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.fine, self.coarse = nn.Conv2d(8, 2 * 7, 1), nn.Conv2d(8, 2 * 7, 1)
        self.register_buffer("small", torch.tensor([[4.0, 6.0], [9.0, 5.0]]).view(1, 2, 1, 1, 2))
        self.register_buffer("large", torch.tensor([[16.0, 10.0], [30.0, 28.0]]).view(1, 2, 1, 1, 2))
        rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
        self.register_buffer("cells", torch.stack([columns, rows], -1).view(1, 1, 4, 4, 2))

    def level(self, x: Tensor, cells: Tensor, anchors: Tensor, stride: int) -> Tensor:
        x = x.unflatten(1, (2, 7)).permute(0, 1, 3, 4, 2).sigmoid()
        centers, sizes = (2 * x[..., :2] - 0.5 + cells) * stride, (2 * x[..., 2:4]) ** 2 * anchors
        return torch.cat([centers, sizes, x[..., 4:]], -1).flatten(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        fine = self.level(self.fine(x)[..., ::2, ::2], self.cells, self.small, 4)
        return torch.cat([fine, self.level(self.coarse(self.down(x)), self.cells, self.large, 8)], 1)


class Tags(nn.Module):
    """An LSTM that reads both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(50, 12), nn.LSTM(12, 10, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(20, 6)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x, (state, _) = self.lstm(self.words(ids))
        return {"tags": self.tags(x), "state": state}


class Pair(nn.Module):
    """Two pictures through the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ELU(), nn.Flatten(), nn.Linear(128, 10))
        self.judge = nn.Linear(10, 2)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.net(left), self.net(right)
        return self.judge((a - b).abs()), F.cosine_similarity(a, b, dim=1)


class Narrow(nn.Module):
    """A depthwise convolution with SiLU, and a gate per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.gate, self.head = nn.Conv2d(16, 16, 1), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.deep(F.silu(self.wide(x))))
        x = x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()
        return self.head(x.mean((2, 3)))


class Encode(nn.Module):
    """A layer of a transformer; what it gives has names."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(60, 24), nn.Parameter(torch.randn(11, 24))
        self.layer = nn.TransformerEncoderLayer(24, 4, 48, 0.0, "gelu", batch_first=True, norm_first=True)
        self.pool = nn.Linear(24, 8)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.layer(self.words(ids) + self.places)
        return {"hidden": x, "pooled": torch.tanh(self.pool(x[:, 0]))}


class Sound(nn.Module):
    """Causal convolutions over samples, with a logarithm and a gated unit."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.body = nn.Conv1d(1, 16, 16, 4), nn.Conv1d(16, 32, 3, dilation=2)
        self.back, self.kind = nn.ConvTranspose1d(16, 1, 16, 4), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.log(self.front(x).abs() + 1e-2)
        x = F.glu(self.body(F.pad(x, (4, 0))), 1)
        return {"wave": self.back(x), "kinds": self.kind(x.amax(2))}


class Mixed(nn.Module):
    """Loud numbers, probabilities, and tiny numbers in one output; and classes of places that are never equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.map = nn.Linear(24, 32), nn.Linear(32, 12), nn.Linear(32, 3 * 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.first(x))
        y = self.last(x)
        sizes = [y[:, :4] * 300, y[:, 4:8].softmax(1), 1e-3 * y[:, 8:].tanh()]
        return torch.cat(sizes, 1), self.map(x).view(-1, 3, 8, 8).argmax(1)


class Exported(NamedTuple):
    qmodel: QuantModel
    file: bytes
    batches: list[Any]


def pictures() -> Tensor:
    return torch.randn(3, 3, 16, 16)


NETS: dict[str, tuple[type[nn.Module], str, Callable[[], Any]]] = {
    "boxes": (Boxes, "w8a8", pictures),
    "tags": (Tags, "w8a8", lambda: torch.randint(0, 50, (3, 8))),
    "pair": (Pair, "w8a8", lambda: (pictures(), pictures())),
    "narrow": (Narrow, "w8a8", pictures),
    "encode": (Encode, "w8a8", lambda: torch.randint(0, 60, (3, 11))),
    "sound": (Sound, "w8a8", lambda: torch.randn(3, 1, 176)),
    "mixed": (Mixed, "w8a8", lambda: torch.randn(5, 24)),
    "mixed, 4 bits": (Mixed, "w4", lambda: torch.randn(5, 24)),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    known: dict[str, Exported] = {}

    def find(name: str) -> Exported:
        if name not in known:
            torch.manual_seed(0)
            make, preset, batch = NETS[name]
            batches = [batch() for _ in range(4)]
            qmodel = sparsebit.quantize(make().eval(), batches, preset, progress=False)
            path = tmp_path_factory.mktemp("exported") / "m.onnx"
            qmodel.export_onnx(batches[0], str(path), batches=batches[1:])
            known[name] = Exported(qmodel, path.read_bytes(), batches)
        return known[name]

    return find


# -- changes of a graph ------------------------------------------------------------------------------------
def nodes(model: Model, op: str) -> list[Any]:
    return [node for node in model.graph.node if node.op_type == op]


def only(model: Model, op: str) -> Any:
    (found,) = nodes(model, op)
    return found


def maker(model: Model, value: str) -> Any:
    return next(node for node in model.graph.node if value in node.output)


def set_attributes(node: Any, **values: Any) -> None:
    kept = [a for a in node.attribute if a.name not in values]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(k, v) for k, v in values.items())])


def edit(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def apply(model: Model) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == name)
        array = np.ascontiguousarray(change(numpy_helper.to_array(tensor).copy()))
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return apply


def behind(model: Model, value: str, op: str, constant: Any = None, **attributes: Any) -> None:
    """One op between `value` and what reads it."""
    node = maker(model, value)
    node.output[:] = [f"{value}/before" if name == value else name for name in node.output]
    inputs = [f"{value}/before"]
    if constant is not None:
        inputs.append(f"{value}/constant")
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(constant), inputs[-1]))
    at = list(model.graph.node).index(node) + 1
    model.graph.node.insert(at, helper.make_node(op, inputs, [value], **attributes))


def levels_in_another_order(model: Model) -> None:
    last = nodes(model, "Concat")[-1]
    last.input[:] = [last.input[1], last.input[0]]


def directions_swapped(model: Model) -> None:
    """Forward and backward half of what the LSTM gives."""
    behind(model, only(model, "LSTM").output[0], "Gather", np.array([1, 0]), axis=1)


def cell_for_state(model: Model) -> None:
    """The state of the cell is given in place of the hidden one."""
    lstm = only(model, "LSTM")
    lstm.output.extend([lstm.output[1]])
    lstm.output[1] = "hidden"


def left_twice(model: Model) -> None:
    for node in model.graph.node:
        node.input[:] = ["left" if name == "right" else name for name in node.input]


def inputs_swapped(model: Model) -> None:
    first, second = (value.name for value in model.graph.input)
    other = {first: second, second: first}
    for node in model.graph.node:
        node.input[:] = [other.get(name, name) for name in node.input]


def sum_of_sizes(model: Model) -> None:
    nodes(model, "ReduceL2")[0].op_type = "ReduceL1"


def largest_in_place_of_mean(model: Model) -> None:
    nodes(model, "GlobalAveragePool")[0].op_type = "GlobalMaxPool"


def padded_with_the_smallest(model: Model) -> None:
    """Zeros at the border of a depthwise convolution become the smallest value of SiLU."""
    (node,) = [n for n in nodes(model, "Conv") if "deep.weight_quantizer/DQ/out" in n.input]
    set_attributes(node, pads=[0, 0, 0, 0])
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(-0.278), "value"))
    at = list(model.graph.node).index(node)
    model.graph.node.insert(at, helper.make_node("Pad", [node.input[0], "pads", "value"], ["padded"]))
    node.input[0] = "padded"


def heads_mixed(model: Model) -> None:
    transposes = [
        n for n in nodes(model, "Transpose") if n.input[0].startswith("layer_self_attn_out_proj.input")
    ]
    set_attributes(transposes[0], perm=[0, 1, 2, 3])


def one_layer_early(model: Model) -> None:
    """The output holds what the last addition reads; what follows stays right."""
    for node in model.graph.node:
        node.input[:] = ["right" if name == "hidden" else name for name in node.input]
        node.output[:] = ["right" if name == "hidden" else name for name in node.output]
    addition = maker(model, "right")
    early = next(name for name in addition.input if maker(model, name).op_type == "Add")
    model.graph.node.append(helper.make_node("Identity", [early], ["hidden"]))


def not_causal(model: Model) -> None:
    (node,) = [n for n in nodes(model, "Conv") if "body.weight_quantizer/DQ/out" in n.input]
    set_attributes(node, pads=[2, 2])


def halves_swapped(model: Model) -> None:
    split = only(model, "Split")
    split.output[:] = [split.output[1], split.output[0]]


def delayed(model: Model) -> None:
    """By one sample."""
    behind(model, "wave", "Gather", np.array([0, *range(175)]), axis=2)


def tiny_numbers(factor: float) -> Change:
    def change(model: Model) -> None:
        behind(model, maker(model, outputs(model)[0]).input[2], "Mul", np.float32(factor))

    return change


def probabilities_of_another_temperature(model: Model) -> None:
    behind(model, only(model, "Softmax").input[0], "Mul", np.float32(1.01))


def one_pixel(model: Model) -> None:
    """Of 64, always the same, is of class 0."""
    keep = np.ones((1, 8, 8), np.int64)
    keep[0, 2, 5] = 0
    behind(model, outputs(model)[1], "Mul", keep)


def outputs(model: Model) -> list[str]:
    return [value.name for value in model.graph.output]


KINDS: dict[str, tuple[str, Change, str]] = {  # net, change, what the first failure names
    "width and height of anchors swapped": ("boxes", edit("large", lambda a: a[..., ::-1]), "the output cat"),
    "boxes half a cell further": ("boxes", edit("cells", lambda a: a + np.float32(0.5)), "the output cat"),
    "anchors of five in a hundred more": (
        "boxes",
        edit("small", lambda a: a * np.float32(1.05)),
        "the output cat",
    ),
    "levels in another order": ("boxes", levels_in_another_order, "the output cat"),
    "both directions of an LSTM swapped": ("tags", directions_swapped, "tags.input_quantizer"),
    "state of the cell for the hidden one": ("tags", cell_for_state, "the output"),
    "the left picture twice": ("pair", left_twice, "net_0.input_quantizer"),
    "inputs swapped": ("pair", inputs_swapped, "net_0.input_quantizer"),
    "sum of sizes for the root of squares": ("pair", sum_of_sizes, "the output sum"),
    "largest for the mean in front of a gate": ("narrow", largest_in_place_of_mean, "gate.input_quantizer"),
    "another number around a picture": ("narrow", padded_with_the_smallest, "sigmoid"),
    "channels of a depthwise weight moved": (
        "narrow",
        edit("deep.weight_quantizer/codes", lambda a: np.roll(a, 1, 0)),
        "deep.weight_quantizer",
    ),
    "heads of attention mixed": ("encode", heads_mixed, "layer_self_attn_out_proj.input_quantizer"),
    "an output one layer early": ("encode", one_layer_early, "the output hidden"),
    "sound that knows the future": ("sound", not_causal, "glu.input_quantizer"),
    "halves of a gated unit swapped": ("sound", halves_swapped, "back.input_quantizer"),
    "sound a sample late": ("sound", delayed, "the output wave"),
    "tiny numbers a thousandth too large": ("mixed", tiny_numbers(1.001), "the output cat[:, 8:12]"),
    "tiny numbers a thousandth too large, 4 bits": (
        "mixed, 4 bits",
        tiny_numbers(1.001),
        "the output cat[:, 8:12]",
    ),
    "another temperature": ("mixed", probabilities_of_another_temperature, "the output cat[:, 4:8]"),
    "another temperature, 4 bits": (
        "mixed, 4 bits",
        probabilities_of_another_temperature,
        "the output cat[:, 4:8]",
    ),
    "one pixel of a map": ("mixed", one_pixel, "the output argmax"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_file_is_refused_where_it_is_wrong(
    exported: Callable[[str], Exported], kind: str, tmp_path: Path
) -> None:
    name, change, first = KINDS[kind]
    found = exported(name)
    model = onnx.load_model_from_string(found.file)
    change(model)
    onnx.save(model, str(tmp_path / "wrong.onnx"))
    report = sparsebit.verify(tmp_path / "wrong.onnx", found.qmodel, found.batches)
    assert not report.ok
    assert report.certificate.failures()[0].startswith(first), report.certificate.failures()[:3]


@pytest.mark.parametrize("name", NETS)
def test_the_right_file_is_accepted(exported: Callable[[str], Exported], name: str, tmp_path: Path) -> None:
    found = exported(name)
    (tmp_path / "right.onnx").write_bytes(found.file)
    assert sparsebit.verify(tmp_path / "right.onnx", found.qmodel, found.batches).ok
