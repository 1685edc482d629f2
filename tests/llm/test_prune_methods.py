"""sparsegpt and wanda on language models: as many zeros as asked for, in checkpoints that are plain float ones."""

from __future__ import annotations

import json

import pytest
import torch
from test_solvers import problem, spec_of
from test_walk import Strange, digest, tiny, tokens

from sparsebit import llm
from sparsebit.errors import ConfigError, ExportError
from sparsebit.llm.methods import METHODS
from sparsebit.numeric.solvers.gptq import Statistics
from sparsebit.numeric.solvers.wanda import wanda

SPEC = spec_of(8, True, None)


def gap(weight, x, pruned):
    return float((x @ (weight - pruned.weight).T).square().sum())


def test_wanda_is_its_formula():
    weight, x = problem(rows=5, inputs=12)
    found = wanda(weight, x.T @ x, 0.25).weight
    worth = weight.abs() * x.norm(dim=0)
    for row, kept, w in zip(worth, found, weight):
        gone = sorted(range(12), key=lambda j: float(row[j]))[:3]
        assert all(kept[j] == 0 for j in gone) and all(kept[j] == w[j] for j in range(12) if j not in gone)
    pairs = wanda(weight, x.T @ x, 0.5, (1, 3)).weight.unflatten(1, (4, 3))
    assert ((pairs != 0).sum(-1) <= 1).all()
    assert (wanda(weight, None, 0.5).weight.abs().sum(1) >= weight.abs().sum(1) / 2).all()  # the larger half
    for wrong in ((0.5, (3, 2)), (1.5, None)):
        with pytest.raises(ConfigError, match="must be"):
            wanda(weight, None, *wrong)


def test_sparsegpt_mends_what_wanda_leaves():
    weight, x = problem(rows=16, inputs=64, tokens=400)
    seen = Statistics(x.T @ x, None, len(x))
    for options in ({"ratio": 0.5}, {"pattern": (2, 4)}):
        a, b = (METHODS[m](weight, seen, SPEC, **options) for m in ("sparsegpt", "wanda"))
        assert a.sparsity == pytest.approx(0.5, abs=0.01) and b.sparsity == pytest.approx(0.5, abs=0.01)
        assert gap(weight, x, a) < 0.8 * gap(weight, x, b)
    moved = x + 0.3 * torch.randn_like(x)  # it aims at what the float inputs gave
    both = [Statistics(moved.T @ moved, cross, len(x)) for cross in ((x - moved).T @ moved, None)]
    errors = [
        float((x @ weight.T - moved @ METHODS["sparsegpt"](weight, s, SPEC).weight.T).square().sum())
        for s in both
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("options", [{"ratio": 0.4}, {"pattern": (2, 4)}])
def test_zeros_are_saved_and_loaded(tmp_path, method, options):
    model = tiny()
    report = llm.quantize(model, tokens(), save=tmp_path, method=method, **options)
    share = 0.5 if "pattern" in options else 0.4
    assert report.sparsity == pytest.approx(share, abs=0.03) and "zeros" in str(report)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config and config["sparsebit"]["format"] == "dense"
    loaded = llm.load(tmp_path, model)
    for name in llm.find_blocks(model).names():
        weight = loaded.get_submodule(name).weight
        if "pattern" in options:
            assert ((weight.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all()
        assert (weight == 0).float().mean() == pytest.approx(share, abs=0.03)
    out, expected = loaded(tokens()[0]), model(tokens()[0])
    assert 0 < (out - expected).square().mean() < expected.square().mean()
    assert report.layers["layers.0.gate"]["error"] > 0


def test_an_interrupted_run_ends_in_the_same_bytes(tmp_path, monkeypatch):
    from sparsebit.llm.checkpoints import store

    llm.quantize(tiny(), tokens(), save=tmp_path / "whole", method="sparsegpt")
    original = store.Store.write
    monkeypatch.setattr(
        store.Store, "write", lambda self, i, *rest: original(self, i, *rest) if i < 2 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        llm.quantize(tiny(), tokens(), save=tmp_path / "parts", method="sparsegpt")
    monkeypatch.undo()
    llm.quantize(tiny(), tokens(), save=tmp_path / "parts", method="sparsegpt")
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_what_does_not_fit_is_refused(tmp_path):
    for wrong in ({"bits": 4}, {"group_size": 16}, {"format": "gptq"}):
        with pytest.raises(ConfigError, match="prunes, and takes no bits"):
            llm.quantize(tiny(), tokens(), save=tmp_path / "a", method="wanda", **wrong)
    with pytest.raises(ConfigError, match="ratio"):
        llm.quantize(tiny(), tokens(), save=tmp_path / "b", method="wanda", ratio=2.0)
    with pytest.raises(ExportError, match="not codes"):
        llm.quantize(tiny(), save=tmp_path / "c", method="rtn", format="dense")
    report = llm.quantize(Strange().eval(), tokens(), save=tmp_path / "d", method="sparsegpt")
    assert "pruned by size" in report.layers["decoder.blocks.0.experts.2"]["note"]
