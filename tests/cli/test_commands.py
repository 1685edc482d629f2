"""Every command does what the library does: results are compared with calls of the library, and with onnxruntime."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_files import batches, net, run_onnx, state
from safetensors.torch import load_file, save_file

import sparsebit as library
from sparsebit.cli.inputs.models import load_model
from sparsebit.sparse.plan import Plan


# -- quantize --------------------------------------------------------------------------------------------
def test_a_run_is_what_the_library_makes(runs):
    expected = library.quantize(net(runs), batches(runs))
    loaded = library.QuantModel.load(runs / "q", net(runs))
    x = torch.randn(5, 3, 8, 8)
    assert torch.equal(loaded(x), expected(x))
    steps = json.loads((runs / "q/run.json").read_text())["steps"]
    assert list(steps) == ["quantize", "export", "sqnr", "latency"] and steps["quantize"]["samples"] == 12
    assert {p.name for p in (runs / "q").iterdir()} == {
        "run.json", "log.txt", "qconfig.yaml", "model.safetensors", "layers.json", "model.onnx",
        "model.report.json", "report.html", "histograms.json", "graph.json",
    }  # fmt: skip


def test_the_file_of_a_run_takes_any_batch(runs):
    """Three samples, where calibration had four; one step of the last grid is the most that may differ."""
    loaded = library.QuantModel.load(runs / "q", net(runs)).eval()
    x = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        expected = loaded(x).numpy()
    assert np.abs(run_onnx(runs / "q/model.onnx", x) - expected).max() < 0.02 * np.abs(expected).max()


def test_config_preset_and_set(sparsebit, work):
    (work / "c.yaml").write_text("W: {QUANTIZER: {BIT: 4}}\n")
    for name, options in (("a", "--config c.yaml"), ("b", "--preset w4a8 --set A.OBSERVER.TYPE=mse")):
        done = sparsebit(f"quantize net.py:build --data x.npy {options} --no-export -o {name}")
        assert done.code == 0, done.err
        used = library.QuantConfig.load(work / name / "qconfig.yaml")
        assert used.w.quantizer.bit == 4
    assert used.a.observer.type == "mse"


def test_weights_and_json(sparsebit, work):
    torch.manual_seed(9)
    path = state(work, **{"7.weight": torch.randn(5, 32)})
    command = f"quantize net.py:build --weights {path} --data xy.npz --no-export -o run --json"
    done = sparsebit(*command.split())
    result = json.loads(done.out)
    assert result["ok"] and result["export"] == {"ok": None} and result["quantize"]["quantized"] == 4
    saved = load_file(work / "run/model.safetensors")
    assert any(torch.equal(v, load_file(path)["7.weight"]) for v in saved.values() if v.shape == (5, 32))


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "module."])
def test_forms_of_weights(work, wrap):
    weights = {k: torch.full_like(v, 2) for k, v in net(work).state_dict().items()}
    found = {"state_dict": weights, "epoch": 3} if wrap == "state_dict" else weights
    if wrap == "module.":
        found = {f"module.{k}": v for k, v in weights.items()}
    torch.save(found, work / "w.pth")
    model = load_model(f"{work}/net.py:build", str(work / "w.pth"))
    assert all(bool((p == 2).all()) for p in model.parameters())


def test_learned_rounding_goes_on_behind_the_last_block(sparsebit, work, monkeypatch):
    command = (
        "quantize net.py:build --data x.npy --preset w4a8-adaround --set W.QUANTIZER.ADAROUND.STEPS=5 -o run"
    )

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(library.QuantModel, "save", interrupt)
        done = sparsebit(command + " --no-export")
    assert done.code == 130 and "finished: nothing yet" in done.err
    learned = {p.name: p.stat().st_mtime_ns for p in (work / "run/reconstruction").iterdir()}
    assert learned
    assert sparsebit(command + " --no-export --resume").code == 0
    assert {p.name: p.stat().st_mtime_ns for p in (work / "run/reconstruction").iterdir()} == learned


def test_resume_skips_what_is_finished(sparsebit, work, monkeypatch):
    pytest.importorskip("onnxruntime")
    command = "quantize net.py:build --data x.npy -o run"
    assert sparsebit(command + " --no-export").code == 0
    weights = (work / "run/model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(library.QuantModel, "calibrate", lambda *a, **k: pytest.fail("calibrated again"))
    done = sparsebit(command + " --resume")
    assert done.code == 0 and (work / "run/model.onnx").exists(), done.err
    assert (work / "run/model.safetensors").stat().st_mtime_ns == weights
    again = sparsebit(command + " --resume")  # nothing left to do
    assert again.code == 0 and "certificate      holds" in again.out


def test_an_export_that_fails_costs_only_the_file(sparsebit, work, monkeypatch):
    pytest.importorskip("onnxruntime")
    from sparsebit.errors import ExportError

    def fail(*args, **kwargs):
        raise ExportError("no way to write this op")

    monkeypatch.setattr(library.QuantModel, "export_onnx", fail)
    done = sparsebit("quantize net.py:build --data x.npy -o run --json")
    assert done.code == 1 and "no way to write this op" in done.err and "--fixed-batch" in done.err
    assert json.loads(done.out)["export"]["ok"] is False
    assert (work / "run/model.safetensors").exists() and not (work / "run/model.onnx").exists()


def test_a_wrong_file_is_on_the_page_and_kept_apart(sparsebit, work, monkeypatch):
    """What onnxruntime computes is made wrong: exit code 1, a red card, no file under the name that was asked for."""
    pytest.importorskip("onnxruntime")
    from sparsebit.export.certificate import runtime

    right = runtime.run
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "run", lambda *args: [2 * output for output in right(*args)])
        done = sparsebit("quantize net.py:build --data x.npy -o run --json")
    assert done.code == 1 and "does not do what the model does" in done.err
    assert not (work / "run/model.onnx").exists() and (work / "run/model.failed.onnx").exists()
    page = (work / "run/report.html").read_text("utf-8")
    assert 'class="tile failed"><dt>Certificate</dt><dd>DOES NOT HOLD' in page
    assert "✗ the file does not do what the model does" in page and "✓" not in page
    told = json.loads(done.out)["export"]
    assert told["ok"] is False and told["certificate"][0].startswith("certificate      DOES NOT HOLD")
    assert sparsebit("report run --format md").code == 0
    assert "**DOES NOT HOLD**" in (work / "run/report.md").read_text("utf-8")
    again = sparsebit("quantize net.py:build --data x.npy -o run --resume")
    assert again.code == 0, again.err
    page = (work / "run/report.html").read_text("utf-8")
    assert "DOES NOT HOLD" not in page and "✓" in page


def test_verify_says_in_its_first_line_what_does_not_hold(sparsebit, work, monkeypatch):
    pytest.importorskip("onnxruntime")
    from sparsebit.export.certificate import runtime

    assert sparsebit("quantize net.py:build --data x.npy -o verified").code == 0
    right = runtime.run
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "run", lambda *args: [2 * output for output in right(*args)])
        done = sparsebit("verify verified/model.onnx")
    assert done.code == 1 and done.out.startswith("certificate      DOES NOT HOLD")
    done = sparsebit("verify verified/model.onnx")
    assert done.code == 0 and done.out.startswith("certificate      holds")


# -- data ------------------------------------------------------------------------------------------------
def test_images_are_seen_as_by_torchvision(sparsebit, work):
    """A grey image: every pixel of every channel is (128/255 - mean) / std, whatever the resizing does."""
    image = pytest.importorskip("PIL.Image")
    from sparsebit.cli.inputs.data import load_batches

    for i in range(5):
        (work / f"images/{i}").mkdir(parents=True)
        image.new("RGB", (40 + i, 30), (128, 128, 128)).save(work / f"images/{i}/a.png")
    found = load_batches(str(work / "images"), None, (1, 3, 16, 12), batch_size=2, samples=3)
    assert [tuple(x.shape) for x in found] == [(2, 3, 16, 12), (1, 3, 16, 12)]
    for channel, (mean, std) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        expected = torch.full((16, 12), (128 / 255 - mean) / std)
        torch.testing.assert_close(found[0][0, channel], expected)


def test_the_middle_of_an_image_is_kept(work):
    """Left half black, right half white, twice as wide as high: a square crop of the middle has half of each."""
    image = pytest.importorskip("PIL.Image")
    from sparsebit.cli.inputs.data import load_batches

    picture = image.new("L", (80, 40), 0)
    picture.paste(255, (40, 0, 80, 40))
    (work / "images").mkdir()
    picture.save(work / "images/a.png")
    x = load_batches(str(work / "images"), None, (1, 1, 20, 20), 1, 1)[0][0, 0]
    assert bool((x[:, :9] == x.min()).all()) and bool((x[:, 11:] == x.max()).all())


def test_arrays_go_by_the_names_of_arguments(sparsebit, work):
    np.savez(work / "pair.npz", right=np.random.rand(6, 6), left=np.random.rand(6, 6))
    done = sparsebit("quantize net.py:Pair --data pair.npz --batch-size 3 -o run --no-export")
    assert done.code == 0, done.err


def test_a_loader_is_not_drained(work):
    """An endless loader is read until there are enough samples."""
    (work / "endless.py").write_text(
        "import itertools, torch\n\ndef batches():\n    for _ in itertools.count():\n        yield torch.zeros(4, 2)\n"
    )
    from sparsebit.cli.inputs.data import load_batches

    assert len(load_batches(f"{work}/endless.py:batches", None, None, 1, 10)) == 3


# -- prune -----------------------------------------------------------------------------------------------
def test_a_pruned_run_loads_again(runs):
    expected = library.prune(net(runs), (batches(runs, 8)[0],), 0.5, batches=batches(runs, 8)).eval()
    small = Plan.load(runs / "p/plan.json").apply(net(runs))
    small.load_state_dict(load_file(runs / "p/model.safetensors"))
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(small.eval()(x), expected(x))
        np.testing.assert_allclose(
            run_onnx(runs / "p/model.onnx", x), expected(x).numpy(), rtol=1e-4, atol=1e-5
        )
    facts = json.loads((runs / "p/run.json").read_text())["steps"]["prune"]
    assert facts["params"] == [sum(p.numel() for p in m.parameters()) for m in (net(runs), small)]
    assert facts["macs"] == [macs(8), macs(4)]


def macs(c: int) -> int:
    """By hand, for the batch of 8: two convolutions on 8 x 8 pixels, a linear layer on 2 x 2."""
    return 8 * (64 * 9 * 3 * c + 64 * 9 * c * c + 4 * c * 5)


def test_prune_by_gradients(sparsebit, work):
    """The labels of xy.npz reach the loss."""
    done = sparsebit("prune net.py:build --data xy.npz --sparser taylor --params 0.6 -o run --json")
    assert done.code == 0, done.err
    before, after = json.loads(done.out)["prune"]["params"]
    assert after <= 0.6 * before


def test_prune_resumes(sparsebit, work, monkeypatch):
    pytest.importorskip("onnxruntime")
    command = "prune net.py:build --input-shape 2,3,8,8 --ratio 0.5 -o run"
    assert sparsebit(command + " --no-export").code == 0
    monkeypatch.setattr(library, "prune", lambda *a, **k: pytest.fail("pruned again"))
    assert sparsebit(command + " --resume").code == 0
    assert (work / "run/model.onnx").exists()


RESIDUAL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x):
        return torch.relu(x + self.f(x))


def build():
    torch.manual_seed(1)
    blocks = [Block() for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(512, 5))
"""


def test_a_shallower_run_loads_again(sparsebit, work):
    pytest.importorskip("onnxruntime")
    (work / "deep.py").write_text(RESIDUAL)
    done = sparsebit("prune deep.py:build --data x.npy --macs 0.4 --merge 1 --depth 1 --round-to 4 -o run")
    assert done.code == 0, done.err
    assert ": a linear layer stands in for it" in done.out and "side by side" in done.out
    again = sparsebit("verify run/model.onnx")
    assert again.code == 0 and "holds" in again.out, again.err


# -- list, config ----------------------------------------------------------------------------------------
def test_list_names_everything_registered(sparsebit):
    from sparsebit.export.backends import BACKENDS
    from sparsebit.quantization.modules import QMODULE_MAP
    from sparsebit.quantization.observers import OBSERVERS_MAP
    from sparsebit.quantization.presets import presets
    from sparsebit.quantization.quantizers import QUANTIZERS_MAP
    from sparsebit.sparse.sparsers import SPARSERS_MAP

    kinds = {
        "observers": OBSERVERS_MAP, "quantizers": QUANTIZERS_MAP, "sparsers": SPARSERS_MAP, "backends": BACKENDS,
        "presets": presets(), "ops": {cls.__name__: cls for cls in QMODULE_MAP.values()},
    }  # fmt: skip
    for kind, registry in kinds.items():
        rows = json.loads(sparsebit("list", kind, "--json").out)
        assert sorted(row["name"] for row in rows) == sorted(map(str, registry))
        assert all(row["help"] for row in rows), [row["name"] for row in rows if not row["help"]]
        assert f"{len(rows)} {kind}" in sparsebit("list", kind).out
    percentile = next(
        r for r in json.loads(sparsebit("list", "observers", "--json").out) if r["name"] == "percentile"
    )
    assert percentile["options"][0].startswith("ALPHA = 0.001  ")


def test_config(sparsebit, work):
    assert sparsebit("config", "init", "--preset", "w4a8", "-o", "q.yaml").code == 0
    assert library.QuantConfig.load(work / "q.yaml") == library.QuantConfig.load("w4a8")
    done = sparsebit("config", "check", "q.yaml", "--json")
    assert json.loads(done.out)["config"]["W"]["QUANTIZER"]["BIT"] == 4
    schema = json.loads(sparsebit("config", "schema").out)
    published = Path(__file__).parents[2] / "docs/qconfig.schema.json"
    assert schema == json.loads(published.read_text())


def test_what_breaks_inside_is_code_70(sparsebit, work, monkeypatch):
    monkeypatch.setattr(library.QuantModel, "preflight", lambda *a: 1 / 0)
    done = sparsebit("check net.py:build --input-shape 2,3,8,8")
    assert done.code == 70 and "ZeroDivisionError" in done.err and "please report" in done.err


def test_json_of_infinity(capsys):
    from sparsebit.cli.terminal.output import show_json

    show_json({"db": float("inf"), "shape": (1, 2)})
    assert json.loads(capsys.readouterr().out) == {"db": "inf", "shape": [1, 2]}


def test_safetensors_of_other_dtypes_fit(work):
    model = net(work)
    save_file(
        {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()},
        work / "h.safetensors",
    )
    loaded = load_model(f"{work}/net.py:build", str(work / "h.safetensors"))
    assert next(loaded.parameters()).dtype is torch.float32
