"""What a run says about the whole model is what its saved and reloaded checkpoint gives on the held-back tokens."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import sys
from pathlib import Path

import pytest
import torch

from llm_assets import Llama, Sizes
from sparsebit import llm
from sparsebit.llm.checkpoints.store import Store
from sparsebit.llm.checks.quality import Quality, advice, quality_of

SMALL = Sizes(dim=32, hidden=64, layers=3, heads=4, kv_heads=2, vocab=64, length=32)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (pip install 'sparsebit[llm]')",
)


def tiny() -> Llama:
    """Weights large enough to have opinions."""
    torch.manual_seed(1)
    model = Llama(SMALL).eval()
    for p in model.parameters():
        p.data.mul_(2.5 if p.dim() == 2 else 1)
    return model


def rows(n: int = 32, words: int = 64, length: int = 16) -> torch.Tensor:
    return torch.randint(3, words, (n, length), generator=torch.Generator().manual_seed(2))


def naive(model, other, tokens: torch.Tensor) -> tuple[float, float, float]:
    """Perplexity of both and KL, token by token."""
    losses, kl = [[], []], []
    with torch.no_grad():
        for row in tokens:
            found = [m(row[None]) for m in (model, other)]
            found = [x if isinstance(x, torch.Tensor) else x.logits for x in found]
            p, q = (x[0].double().log_softmax(-1) for x in found)
            for i in range(len(row) - 1):
                losses[0].append(-p[i, row[i + 1]].item())
                losses[1].append(-q[i, row[i + 1]].item())
                kl.append(sum((p[i, k].exp() * (p[i, k] - q[i, k])).item() for k in range(p.shape[1])))
    mean = lambda values: sum(values) / len(values)
    return math.exp(mean(losses[0])), math.exp(mean(losses[1])), mean(kl)


WAYS = [
    {"bits": 2},
    {"bits": 3, "match_float": True},
    {"bits": 3, "spill": True},
    {"method": "awq", "bits": 3},
    {"method": "rtn", "bits": 3},
    {"method": "smoothquant"},
    {"method": "wanda"},
    {"candidate_bits": (2, 4), "average_bits": 3.0},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_figures_are_those_of_the_checkpoint(tmp_path, options):
    model, tokens = tiny(), rows()
    grouped = options.get("method") not in ("smoothquant", "wanda")
    report = llm.quantize(
        model, list(tokens.split(5)), save=tmp_path, **({"group_size": 16} if grouped else {}), **options
    )
    held = tokens[-16:] if options.get("method") == "rtn" else tokens[-2:]  # rtn is fitted on nothing
    found, expected = report.measured, naive(model, llm.load(tmp_path, model), held)
    assert (found.before, found.after, found.kl) == pytest.approx(expected, rel=1e-3)
    assert found.tokens == held[:, 1:].numel() and found.apart
    assert found.kl > 1e-5  # the two models differ, so the figures are not those of one model


def test_nothing_is_fitted_on_what_is_held_back(tmp_path):
    tokens = rows()
    other = torch.cat([tokens[:-2], rows(2, length=16).flip(1)])
    for name, data in (("a", tokens), ("b", other), ("c", tokens[:-2])):
        llm.quantize(
            tiny(), [data[:30], data[30:]] if len(data) > 30 else [data], save=tmp_path / name, bits=3
        )
    block = "model-block-00001.safetensors"
    files = {name: (tmp_path / name / block).read_bytes() for name in "abc"}
    assert files["a"] == files["b"] != files["c"]  # the last one holds back others


def test_few_sequences_are_measured_on_themselves(tmp_path):
    model, tokens = tiny(), rows(5)
    report = llm.quantize(model, [tokens], save=tmp_path, bits=3, group_size=16)
    assert not report.measured.apart and "fitted on as well" in str(report)
    expected = naive(model, llm.load(tmp_path, model), tokens)
    assert (report.measured.before, report.measured.after) == pytest.approx(expected[:2], rel=1e-3)


def test_a_resumed_run_has_the_same_figures(tmp_path, monkeypatch):
    tokens, write = list(rows().split(4)), Store.write
    whole = llm.quantize(tiny(), tokens, save=tmp_path / "whole", bits=3, group_size=16)

    def stop(self, block, *rest):
        write(self, block, *rest)
        if block == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        llm.quantize(tiny(), tokens, save=tmp_path / "cut", bits=3, group_size=16)
    monkeypatch.undo()
    again = llm.quantize(tiny(), tokens, save=tmp_path / "cut", bits=3, group_size=16)
    assert again.measured == whole.measured


def test_figures_are_in_every_place(tmp_path):
    report = llm.quantize(tiny(), list(rows().split(4)), save=tmp_path, bits=4, group_size=16)
    found = report.measured
    assert quality_of(json.loads((tmp_path / "run.json").read_text())["measured"]) == found
    size = sum(p.numel() * 4 for p in tiny().parameters())  # the head is tied
    assert json.loads((tmp_path / "run.json").read_text())["float_bytes"] == size
    card = (tmp_path / "README.md").read_text()
    assert f"| perplexity, float | {found.before:.4g} |" in card
    assert f"| perplexity, this model | {found.after:.4g} |" in card
    assert str(report).splitlines()[-1] == str(found)
    without = llm.quantize(tiny(), method="rtn", save=tmp_path / "rtn", group_size=16)
    assert without.measured is None and "perplexity" not in (tmp_path / "rtn" / "README.md").read_text()
    assert "perplexity was not measured" in str(without)


def test_a_collapse_is_a_warning_with_a_way_out(tmp_path, caplog):
    """Most weights are zeros afterwards."""
    model, tokens = tiny(), rows()
    with torch.no_grad():  # a text that the model likes
        for _ in range(3):
            tokens = torch.cat([tokens[:, :1], model(tokens).argmax(-1)[:, :-1]], 1)
    with caplog.at_level(logging.WARNING, "sparsebit"):
        report = llm.quantize(
            model, list(tokens.split(4)), method="wanda", ratio=0.95, save=tmp_path / "zeros"
        )
    assert report.measured.collapsed and "the model has collapsed" in report.warning
    assert "prune less" in report.warning and report.warning in caplog.text
    caplog.clear()
    fine = llm.quantize(model, list(tokens.split(4)), bits=8, group_size=16, save=tmp_path / "w8")
    assert not fine.measured.collapsed and fine.warning == "" and not caplog.text


def test_what_a_collapse_is():
    assert not Quality(10, 20.0, 39.9, 0.9).collapsed
    assert Quality(10, 20.0, 40.1, 0.9).collapsed and Quality(10, 20.0, 21.0, 1.1).collapsed
    assert Quality(10, 20.0, math.inf, math.nan).collapsed
    lost = Quality(10, 20.0, math.inf, 3.0)
    assert quality_of(json.loads(json.dumps(lost.facts()))) == lost


@pytest.mark.parametrize("run, words", [
    ({"method": "rtn"}, "method='gptq'"),
    ({"method": "sparsegpt"}, "prune less"),
    ({"bits": 2}, "bits=3"),
    ({"bits": 3, "symmetric": True}, "symmetric=False"),
    ({"candidate_bits": [2, 3]}, "average_bits"),
    ({"bits": 4}, "group_size=32"),
])  # fmt: skip
def test_advice(run, words):
    usual = {"method": "gptq", "bits": 4, "symmetric": False, "candidate_bits": []}
    assert words in advice({**usual, **run})


# -- 2 bits --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "rtn"])
def test_two_bits_are_not_worse_by_default_than_with_zero_points(tmp_path, method):
    """They have signed scales; without them, KL is more than twice that of zero points."""
    found = {}
    for symmetric in (None, False):
        folder = tmp_path / str(symmetric)
        data = list(rows(128).split(4))
        found[symmetric] = llm.quantize(
            tiny(), data, save=folder, bits=2, group_size=16, method=method, symmetric=symmetric
        ).measured
    assert found[None].kl < 1.2 * found[False].kl


def test_grids_without_signed_scales_have_zero_points_at_two_bits(tmp_path):
    for bits, symmetric in ((2, False), (3, True), (4, True)):
        folder = tmp_path / str(bits)
        llm.quantize(tiny(), list(rows().split(4)), save=folder, bits=bits, group_size=16, clip="minmax")
        assert json.loads((folder / "run.json").read_text())["run"]["symmetric"] is symmetric


@needs_transformers
@pytest.mark.parametrize("options, symmetric", [
    ({"bits": 2}, True),
    ({"bits": 2, "clip": "minmax"}, False),
    ({"bits": 2, "clip": "minmax", "format": "gptq"}, True),  # vLLM has no zero points at 2 bits
    ({"bits": 2, "symmetric": True}, True),
    ({"bits": 4}, True),
    ({"bits": 4, "symmetric": False}, False),
    ({"candidate_bits": (2, 4), "average_bits": 3.0, "clip": "minmax"}, True),  # one scheme only
])  # fmt: skip
def test_readers_decide_about_zero_points(tmp_path, options, symmetric):
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "zoo")]
    __import__("zoo_shim").install()
    from tiny_transformers import ARCHITECTURES

    model, _ = ARCHITECTURES["LlamaForCausalLM"]()
    report = llm.quantize(model, list(rows(16, 96).split(4)), save=tmp_path, **options)
    assert json.loads((tmp_path / "run.json").read_text())["run"]["symmetric"] is symmetric
    assert {row.state for row in report.readers if row.reader == "transformers"} <= {"runs", "unknown"}
    expected = naive(model, llm.load(tmp_path), rows(16, 96)[-1:])
    found = report.measured
    assert (found.before, found.after, found.kl) == pytest.approx(expected, rel=1e-3)
