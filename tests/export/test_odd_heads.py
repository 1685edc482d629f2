"""Heads of detectors, taggers and decoders: right files are accepted, and the same files made wrong are refused.

Each has something that once let wrong files pass, or would have stopped right ones: whole numbers as an output, anchors
that do not depend on the input, a mask of huge numbers, outputs of very different size.
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
from sparsebit.export.certificate.end_to_end import OutputNoise, check_output, disturbed
from sparsebit.export.certificate.quantized_model import QUIET, Certificate
from sparsebit.export.export_module import export_module

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
from onnx import helper, numpy_helper  # noqa: E402


class Keypoints(nn.Module):
    """Heat maps at four times the size, offsets, and the class of every pixel as a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, padding=1)
        self.heat, self.offsets = nn.Conv2d(16, 5, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.body(F.relu(self.stem(x))))
        heat = F.interpolate(self.heat(x), scale_factor=4.0, mode="bilinear")
        return {"offsets": self.offsets(x), "classes": heat.argmax(1)}


class Anchored(nn.Module):
    """Boxes in pixels: what the network says is less than a hundredth of the anchors that it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.scores, self.shift = nn.Conv2d(3, 8, 3, 4, 1), nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)
        self.register_buffer("anchors", 320 + 160 * torch.linspace(-1, 1, 4 * 16).view(1, 4, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.silu(self.stem(x))
        return self.shift(x).flatten(2).tanh() + self.anchors, self.scores(x).flatten(2).sigmoid()


class Tagger(nn.Module):
    """Attention over frames with a mask of the lowest float; log-probabilities for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(6, 16, 3, padding=1)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = F.gelu(self.front(x)).transpose(1, 2)
        weights = (self.query(x) @ self.key(x).transpose(1, 2) / 4 + mask).softmax(-1)
        return self.head(x + weights @ self.value(x)).log_softmax(-1)


class Decoder(nn.Module):
    """A variational decoder: a picture, its mean as one number per picture, and a variance of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.up = nn.Linear(10, 16 * 4), nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.last, self.variance = nn.Conv2d(8, 3, 3, padding=1), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grid = F.leaky_relu(self.grow(x)).view(-1, 16, 2, 2)
        picture = self.last(F.leaky_relu(self.up(grid))).sigmoid()
        return picture, picture.mean((1, 2, 3)), (4 * self.variance(x)).exp()


class Siamese(nn.Module):
    """Two inputs through the same layers; a distance and two embeddings of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.PReLU(8), nn.Conv2d(8, 8, 3, 2), nn.Hardswish())
        self.embed = nn.Linear(8, 6)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (F.normalize(self.embed(self.net(x).mean((2, 3))), dim=1) for x in (a, b))
        return (first - second).square().sum(1).sqrt(), first


def masked() -> tuple[Tensor, Tensor]:
    mask = torch.zeros(3, 1, 12)
    mask[:, :, 9:] = torch.finfo(torch.float32).min
    return torch.randn(3, 6, 12), mask


NETS: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "keypoints": (Keypoints, lambda: torch.randn(3, 3, 16, 16)),
    "anchored": (Anchored, lambda: torch.randn(3, 3, 16, 16)),
    "tagger": (Tagger, masked),
    "decoder": (Decoder, lambda: torch.randn(3, 10)),
    "siamese": (Siamese, lambda: (torch.randn(3, 1, 15, 15), torch.randn(3, 1, 15, 15))),
}


class Exported(NamedTuple):
    qmodel: sparsebit.QuantModel
    report: Any
    file: bytes
    batches: list[Any]


@pytest.fixture(scope="module", params=NETS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    torch.manual_seed(0)
    make, batch = NETS[request.param]
    batches = [batch() for _ in range(4)]
    qmodel = sparsebit.quantize(make().eval(), batches, progress=False)
    path = tmp_path_factory.mktemp(request.param) / "m.onnx"
    report = qmodel.export_onnx(batches[0], str(path), batches=batches[1:])
    return Exported(qmodel, report, path.read_bytes(), batches)


def test_the_right_file_is_accepted(exported: Exported, tmp_path: Path) -> None:
    assert exported.report.ok
    for name in exported.report.certificate.runtime.outputs:
        assert exported.report.certificate.allowed(name)[0] < -20, str(exported.report)
    path = tmp_path / "m.onnx"
    path.write_bytes(exported.file)
    assert sparsebit.verify(path, exported.qmodel, exported.batches).ok


def constants(model: Any, ending: str) -> list[Any]:
    return [t for t in model.graph.initializer if t.name.endswith(ending)]


def replace(tensor: Any, value: np.ndarray) -> None:
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def double_a_scale(model: Any) -> str:
    scale = constants(model, ".input_quantizer/scale")[-1]
    replace(scale, numpy_helper.to_array(scale) * np.float32(2))
    return scale.name.removesuffix("/scale")


def drop_a_bias(model: Any) -> str:
    bias = constants(model, "bias/codes")[0]
    replace(bias, numpy_helper.to_array(bias) * 0)
    return bias.name.removesuffix("/codes")


def cut_off(model: Any) -> str:
    """The first output that nobody else reads now comes from a value `before`."""
    read = {name for node in model.graph.node for name in node.input}
    name = next(output.name for output in model.graph.output if output.name not in read)
    node = next(n for n in model.graph.node if name in n.output)
    node.output[list(node.output).index(name)] = "before"
    return name


def permute_an_output(model: Any) -> str:
    """The pictures of a batch in another order."""
    name = cut_off(model)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 0]), "order"))
    model.graph.node.append(helper.make_node("Gather", ["before", "order"], [name], axis=0))
    return f"the output {name}"


def scale_an_output(model: Any) -> str:
    name = cut_off(model)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1.05), "factor"))
    model.graph.node.append(helper.make_node("Mul", ["before", "factor"], [name]))
    return f"the output {name}"


@pytest.mark.parametrize("change", [double_a_scale, drop_a_bias, permute_an_output, scale_an_output])
def test_the_file_made_wrong_is_refused_where_it_is_wrong(exported, change, tmp_path) -> None:
    model = onnx.load_model_from_string(exported.file)
    if change is drop_a_bias and not constants(model, "bias/codes"):
        pytest.skip("its biases are float")
    first = change(model)
    onnx.save(model, str(tmp_path / "wrong.onnx"))
    report = sparsebit.verify(tmp_path / "wrong.onnx", exported.qmodel, exported.batches)
    assert not report.ok
    assert report.certificate.failures()[0].startswith(first), report.certificate.failures()[:3]


# -- the parts ---------------------------------------------------------------------------------------------
def test_huge_numbers_move_by_their_own_size() -> None:
    lowest = torch.finfo(torch.float32).min
    x = torch.tensor([0.0, 1.0, -2.0, lowest, -1e9, float("-inf")])
    moved = disturbed(x)
    assert (moved[:3] - x[:3]).abs().max() < 1e-4 and (moved[:3] != x[:3]).all()
    torch.testing.assert_close(moved[3:5], x[3:5], rtol=1e-4, atol=0)
    assert moved.isfinite()[:5].all() and moved[5] == x[5]


def test_a_floor_that_is_no_number_allows_nothing() -> None:
    certificate, x = Certificate(), np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    certificate.runtime.add(["y"], [x], [x + np.float32(0.5)])
    for floor in certificate.floors:
        floor.add(["y"], [x], [np.full_like(x, np.nan)])
    assert certificate.allowed("y")[0] <= QUIET
    assert certificate.output_failures()


def test_what_does_not_change_with_the_input_is_no_signal() -> None:
    rng = np.random.default_rng(0)
    anchors, said = rng.uniform(0, 640, (1, 64)), rng.normal(size=(8, 64))
    several = OutputNoise()
    several.add(anchors + said, anchors + said)
    one_by_one = OutputNoise()
    for row in said:
        one_by_one.add(anchors + row, anchors + row)
    expected = 10 * np.log10((said**2).mean() / (anchors**2).mean())
    assert several.moving_db == pytest.approx(expected, abs=1)
    assert one_by_one.moving_db == pytest.approx(expected, abs=1)
    certificate = Certificate()
    certificate.runtime.add(["boxes"], [anchors + said], [anchors + rng.normal(size=said.shape)])
    assert certificate.runtime.noise_db < QUIET  # against everything: nobody would notice
    assert certificate.output_failures()


def test_whole_numbers_are_counted() -> None:
    a = np.arange(1000).reshape(10, 100)
    b = a.copy()
    b[0, 0] = 999
    output = OutputNoise()
    output.add(a, b)
    assert (output.holds_labels, output.axis, output.labels, output.labels_differ) == (True, None, 1000, 1)
    assert str(output) == "1 of 1000 values differ"
    assert check_output([a], [b]) == 0.001


def test_the_report_says_which_session_was_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(3, 10) for _ in range(3)]
    qmodel = sparsebit.quantize(Decoder().eval(), batches, progress=False)
    users = qmodel.export_onnx(batches[0], str(tmp_path / "users.onnx"))
    other = qmodel.export_onnx(batches[0], str(tmp_path / "other.onnx"), backend="virtual")
    plain = export_module(Decoder().eval(), batches[0], tmp_path / "plain.onnx")
    assert [r.as_dict()["session"] for r in (users, plain)] == ["as users run it"] * 2
    assert "as users run it" not in str(other) and "\nin onnxruntime " in str(other)
    assert set(other.others) == {"onnxruntime"} and other.others["onnxruntime"].noise_db < -30
