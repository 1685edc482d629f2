"""More kinds of wrong files, on other models than those of test_wrong_files: gates, masks, pixels and 4-bit weights."""

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


class Sentence(nn.Module):
    """Words, a GRU and attention that looks back only."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(40, 16), nn.GRU(16, 16, batch_first=True)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.value.weight.data *= 10  # where GELU and its approximation differ
        self.tags = nn.Linear(16, 7)
        self.register_buffer("mask", torch.full((9, 9), -1e4).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.gru(self.words(ids))
        attended = (self.query(x) @ self.key(x).transpose(1, 2) + self.mask).softmax(-1) @ self.value(x)
        return self.tags(F.gelu(attended))


class Sharpen(nn.Module):
    """A picture at four times its size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.wide, self.last = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        x = F.interpolate(x, scale_factor=2, mode="bilinear")
        return self.last(F.pixel_shuffle(self.wide(x), 2))


class Exported(NamedTuple):
    qmodel: QuantModel
    file: bytes
    batches: list[Tensor]


NETS: dict[str, tuple[type[nn.Module], str, Callable[[], Tensor]]] = {
    "sentence": (Sentence, "w8a8", lambda: torch.randint(0, 40, (3, 9))),
    "sentence, 4 bits": (Sentence, "w4", lambda: torch.randint(0, 40, (3, 9))),
    "sharpen": (Sharpen, "w8a8", lambda: torch.randn(3, 3, 12, 12)),
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


def only(model: Model, op: str) -> Any:
    (found,) = [node for node in model.graph.node if node.op_type == op]
    return found


def set_attribute(node: Any, name: str, value: Any) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def change_constant(model: Model, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))


def swap_gates(model: Model) -> None:
    """Reset and update of the recurrent weight."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    unsqueeze = made_by[only(model, "GRU").input[2]]
    concat = made_by[unsqueeze.input[0]]
    first, second, third = concat.input
    concat.input[:] = [second, first, third]


def forget_the_state(model: Model) -> None:
    """The GRU starts from ones."""
    change_constant(model, only(model, "GRU").input[5], np.ones_like)


def look_ahead(model: Model) -> None:
    """Every word sees the next one too."""
    change_constant(model, "mask", lambda mask: np.triu(mask, 2))


def one_step_of_a_weight(model: Model) -> None:
    change_constant(
        model,
        "key.weight_quantizer/scale",
        lambda s: s * (1 + 0.01 * np.eye(1, s.size, 3)[0]).astype(s.dtype),
    )


KINDS: dict[str, tuple[str, Callable[[Model], None], str]] = {  # net, change, what the first failure names
    "gates of a GRU swapped": ("sentence", swap_gates, "query.input_quantizer"),
    "the first state of a GRU": ("sentence", forget_the_state, "query.input_quantizer"),
    "a mask that looks ahead": ("sentence", look_ahead, "matmul_1"),
    "a mask that looks ahead, float activations": ("sentence, 4 bits", look_ahead, "the output"),
    "scale of one channel a hundredth too large, 4 bits": (
        "sentence, 4 bits",
        one_step_of_a_weight,
        "key.weight_quantizer",
    ),
    "GELU by tanh": (
        "sentence, 4 bits",
        lambda model: set_attribute(only(model, "Gelu"), "approximate", "tanh"),
        "the output",
    ),
    "corners aligned": (
        "sharpen",
        lambda model: set_attribute(only(model, "Resize"), "coordinate_transformation_mode", "align_corners"),
        "wide.input_quantizer",
    ),
    "edge in place of reflection": (
        "sharpen",
        lambda model: set_attribute(only(model, "Pad"), "mode", "edge"),
        "sigmoid.input_quantizer",
    ),
    "pixels shuffled in another order": (
        "sharpen",
        lambda model: set_attribute(only(model, "DepthToSpace"), "mode", "DCR"),
        "last.input_quantizer",
    ),
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
