"""The measures of benchmarks/real_networks.py, on cases whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import fx, nn

from real import coco, constants, feeds, ocr, scores, speech, table
from real.place import Place, write


def test_batches_come_back_in_their_order(tmp_path: Path) -> None:
    batches = [{"ids": np.full((2, 3), i), "mask": np.ones((2, 3))} for i in range(12)]
    feeds.save_batches(tmp_path / "b.npz", batches)
    found = list(feeds.load_batches(tmp_path / "b.npz"))
    assert [list(batch) for batch in found] == [["ids", "mask"]] * 12
    assert [batch["ids"][0, 0] for batch in found] == list(range(12))


def test_decibels() -> None:
    signal = np.ones(100)
    assert scores.decibels(signal, signal * 0.9) == 20
    assert scores.decibels(signal, signal) == 200


def test_the_interval_narrows_with_the_rows_and_is_the_same_for_every_tool() -> None:
    right = np.random.default_rng(1).random(4000) < 0.7
    few, many = (scores.replicates(lambda rows: 100 * right[rows].mean(), np.arange(n)) for n in (40, 4000))
    assert np.ptp(scores.interval(few)) > 5 * np.ptp(scores.interval(many))
    assert few == scores.replicates(lambda rows: 100 * right[rows].mean(), np.arange(40))


def found(boxes: list[list[int]], values: list[float]) -> dict[str, object]:
    """What pycocotools says of one image: which boxes are right at each of two thresholds."""
    hit = np.array(boxes)
    return {
        "gtIgnore": np.zeros(2),
        "dtScores": values,
        "dtMatches": hit,
        "dtIgnore": np.zeros(hit.shape, bool),
    }


def test_average_precision_of_a_class() -> None:
    assert coco.class_precision([found([[1, 2]], [0.9, 0.8])]) == pytest.approx(1)
    # One of two objects, behind a wrong box: precision 1/2 up to a recall of 1/2, that is 51 of 101 points.
    assert coco.class_precision([found([[0, 2]], [0.9, 0.8])]) == pytest.approx(0.5 * 51 / 101)
    assert coco.class_precision([None]) is None


def test_codes_of_ctc_are_collapsed() -> None:
    assert ocr.collapsed(np.array([0, 3, 3, 0, 3, 4, 4, 0])) == [3, 3, 4]


def test_boxes_are_counted_once() -> None:
    boxes = np.array([[0, 0, 10, 10], [1, 1, 11, 11], [50, 50, 60, 60]], float)
    assert ocr.counted(boxes, [[0, 0, 10, 10], [200, 200, 210, 210]]) == (1, 3, 2)
    assert ocr.counted(np.zeros((0, 4)), [[0, 0, 10, 10]]) == (0, 0, 1)


@pytest.mark.parametrize(("heard", "errors"), [("a b c", 0), ("a c", 1), ("a b b c", 1), ("x y", 3), ("", 3)])
def test_word_errors(heard: str, errors: int) -> None:
    assert speech.word_errors(["a", "b", "c"], heard.split()) == errors


class OnnxSlice(nn.Module):
    """As onnx2torch has it: everything comes as a tensor."""

    def forward(
        self, x: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, axes: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError


class OnnxReshape(nn.Module):
    def forward(self, x: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut, self.shaped = OnnxSlice(), OnnxReshape()
        for name, value in {"starts": [1], "ends": [3], "axes": [-1], "shape": [0, -1]}.items():
            self.register_buffer(name, torch.tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shaped(self.cut(x, self.starts, self.ends, self.axes), self.shape)


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def test_constants_are_written_down() -> None:
    model = Sliced()
    model = constants.written_down(fx.GraphModule(model, Leaves().trace(model)))
    x = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(model(x), x[:, :, 1:3].reshape(2, -1))
    assert not [node for node in model.graph.nodes if node.op == "get_attr"]


def row(place: Place, tool: str, where: str, value: float, noise: float) -> None:
    kept = {
        "network": "YOLOX-nano",
        "tool": tool,
        "where": where,
        "metric": "AP",
        "value": value,
        "sqnr": [noise],
        "interval": [value - 1, value + 1],
        "replicates": [value + i / 100 for i in range(-50, 50)],
        "also": {},
    }
    write(place.score(tool, where), kept)
    write(place.made(tool), {"certified": True})


@pytest.mark.parametrize(("ours", "verdict"), [(31.5, "yes"), (25.0, "NO (YOLOX-nano)")])
def test_the_table_judges_by_its_bars(tmp_path: Path, ours: float, verdict: str) -> None:
    place = Place(tmp_path, "YOLOX-nano")
    place.folder.mkdir(parents=True)
    for tool, where, value in (("float", "here", 33), ("ours", "here", ours), ("nncf", "here", 30)):
        row(place, tool, where, value, 14.0 if tool == "ours" else 12.0)
    row(place, "nncf-mixed", "here", 31, 13.0)
    write(place.times("here"), {"ours": {"ms": 2.0, "ratio": 0.9}})
    shown = table.text({"YOLOX-nano": place}, "here", "ours")
    assert f"by more than the interval: {verdict}" in shown
    assert "SQNR above NNCF's: 1 of 1" in shown
    assert f"at least 31: {'yes' if ours > 31 else 'NO'}; at most the float time: 0.90 (yes)" in shown
    assert json.loads(place.score("ours", "here").read_text())["value"] == ours


def test_a_file_made_anew_takes_its_old_results_with_it(tmp_path: Path) -> None:
    place = Place(tmp_path, "A net")
    place.folder.mkdir(parents=True)
    for tool in ("ours", "ours-other"):
        row(place, tool, "here", 1, 1)
    write(place.times("here"), {"ours": {"ratio": 1}, "float": {"ratio": 1}})
    place.forget("ours")
    assert place.tools() == ["ours-other"]
    assert json.loads(place.times("here").read_text()) == {"float": {"ratio": 1}}
