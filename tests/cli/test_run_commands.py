"""Commands about a model or a run: check, profile, verify, export; compared with calls of the library."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from cli_files import batches, net, run_onnx

import sparsebit as library


def test_check(sparsebit, work):
    done = sparsebit("check net.py:build --input-shape 2,3,8,8 --json")
    report = json.loads(done.out)
    expected = library.preflight(net(work), torch.randn(2, 3, 8, 8))
    assert report["totals"] == expected.totals
    assert report["pruning"]["layers"] == {
        "0": {"channels": 8, "may_go": 8},
        "3": {"channels": 8, "may_go": 8},
    }
    text = sparsebit("check net.py:build --input-shape 2,3,8,8 --verbose").out
    assert str(expected) in text and "channels of 2 layers can be removed" in text
    text = sparsebit("check net.py:build --input-shape 2,3,8,8").out
    assert expected.short() in text and "channels of 2 layers can be removed" in text
    assert str(expected) not in text and "--verbose" in text


def test_check_fails_where_nothing_is_quantized(sparsebit, work):
    (work / "plain.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Flatten())\n"
    )
    assert sparsebit("check plain.py:build --input-shape 2,3,8,8").code == 1


def test_models_that_fx_cannot_trace(sparsebit, work):
    """A layer looked up by dtype: an island for torch.fx, a whole graph for torch.export; the run remembers which."""
    (work / "hard.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Hard(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        x = {torch.float32: self.fc}[x.dtype](x)\n"
        "        return x @ x.transpose(-1, -2)\n"
    )
    check = lambda trace: json.loads(
        sparsebit(f"check hard.py:Hard --input-shape 2,4,8 --trace {trace} --json").out
    )
    fx, export = check("fx"), check("export")
    assert "--trace export" in sparsebit("check hard.py:Hard --input-shape 2,4,8 --trace fx").err
    assert check("auto")["totals"] == export["totals"]  # and it is the default
    assert "traced by torch.export" in sparsebit("check hard.py:Hard --input-shape 2,4,8").out
    assert fx["islands"] and not export["islands"]
    assert fx["totals"]["quantized_macs"] < export["totals"]["quantized_macs"] == export["totals"]["macs"]
    np.save(work / "h.npy", np.random.rand(4, 4, 8))
    command = "quantize hard.py:Hard --data h.npy --batch-size 2 --trace export --no-export -o run"
    assert sparsebit(command).code == 0
    assert sparsebit(command + " --resume").code == 0


def test_exported_programs(sparsebit, work):
    program = torch.export.export(net(work), (torch.randn(4, 3, 8, 8),))
    torch.export.save(program, work / "net.pt2")
    done = sparsebit("quantize net.pt2 --data x.npy --batch-size 4 -o run --no-export")
    assert done.code == 0, done.err
    pytest.importorskip("onnxruntime")
    assert sparsebit("export run").code == 0  # and both files are timed, as those of other models
    assert json.loads((work / "run/run.json").read_text())["steps"]["latency"]["milliseconds"]["float"] > 0
    refused = sparsebit("prune net.pt2 --input-shape 4,3,8,8 -o p")
    assert refused.code == 2 and "file.py:factory" in refused.err and not (work / "p").exists()


def test_profile(sparsebit, runs, tmp_path):
    run = shutil.copytree(runs / "q", tmp_path / "q")
    done = sparsebit("profile", run, "--json")
    qmodel = library.quantize(net(runs), batches(runs))
    expected = qmodel.profile(batches(runs)[:1])
    assert json.loads(done.out)["total"] == pytest.approx(expected.total)
    assert [row["name"] for row in json.loads(done.out)["rows"]] == [row.name for row in expected.rows]
    assert json.loads((run / "profile.json").read_text()) == json.loads(done.out)


def test_verify(sparsebit, runs, tmp_path):
    assert sparsebit("verify", runs / "q/model.onnx").code == 0
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(runs / "q/model.onnx"))
    weight = next(t for t in model.graph.initializer if len(t.dims) == 4)
    codes = numpy_helper.to_array(weight).copy()
    codes.flat[0] ^= 3
    weight.CopyFrom(numpy_helper.from_array(codes, weight.name))
    onnx.save(model, str(tmp_path / "changed.onnx"))
    done = sparsebit("verify", tmp_path / "changed.onnx", "--run", runs / "q", "--json")
    assert done.code == 1 and json.loads(done.out)["ok"] is False


def test_verify_takes_the_folder_of_a_run(sparsebit, runs, tmp_path):
    done = sparsebit("verify", runs / "q")
    assert done.code == 0 and "certificate      holds" in done.out
    run = shutil.copytree(runs / "q", tmp_path / "q")
    (run / "model.onnx").rename(run / "model.failed.onnx")
    done = sparsebit("verify", run)
    assert done.code == 2 and "verify one of its files: model.failed.onnx" in done.err
    (run / "model.failed.onnx").unlink()
    assert "sparsebit export" in sparsebit("verify", run).err
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm/config.json").write_text("{}")
    assert "sparsebit llm eval" in sparsebit("verify", tmp_path / "llm").err


def test_verify_pruned(sparsebit, runs, tmp_path):
    """The outputs of the file are those of the model that the plan and the weights make."""
    done = sparsebit("verify", runs / "p/model.onnx", "--json")
    assert done.code == 0 and json.loads(done.out)["ok"] is True
    assert json.loads(done.out)["outputs"]
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(runs / "p/model.onnx"))
    weight = next(t for t in model.graph.initializer if len(t.dims) == 4)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 1.01, weight.name))
    onnx.save(model, str(tmp_path / "changed.onnx"))
    done = sparsebit("verify", tmp_path / "changed.onnx", "--run", runs / "p")
    assert done.code == 1 and "DOES NOT HOLD" in done.out
    del model.metadata_props[:]
    onnx.save(model, str(tmp_path / "foreign.onnx"))
    done = sparsebit("verify", tmp_path / "foreign.onnx", "--run", runs / "p")
    assert done.code == 2 and "was not written by Sparsebit" in done.err


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("export RUN -o new.onnx", "sparsebit.cli.runs.steps.write_onnx"),
        ("verify RUN/model.onnx", "sparsebit.cli.runs.steps.finished"),
        ("profile RUN", "sparsebit.quantization.QuantModel.profile"),
        ("report RUN -o new.html", "sparsebit.cli.commands.report.render"),
        ("check NET --input-shape 4,3,8,8", "sparsebit.cli.inputs.inputs.Inputs.load"),
    ],
)
def test_ctrl_c_elsewhere(sparsebit, runs, tmp_path, monkeypatch, words, where):
    """Commands that read a run leave it as it was, and show the line that starts them again."""
    run = shutil.copytree(runs / "q", tmp_path / "q")
    before = {path.name: path.read_bytes() for path in run.iterdir()}

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(where, interrupt)
    words = words.replace("RUN", str(run)).replace("NET", f"{runs}/net.py:build")
    done = sparsebit(words)
    assert done.code == 130 and done.err.splitlines()[-1].strip() == f"sparsebit {words}"
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert not list(tmp_path.glob("new*"))


def test_export_for_another_backend(sparsebit, runs, tmp_path):
    done = sparsebit("export", runs / "q", "--backend", "virtual", "-o", tmp_path / "v.onnx", "--json")
    assert done.code == 0 and json.loads(done.out)["backend"] == "virtual"
    x = torch.randn(2, 3, 8, 8)
    a, b = run_onnx(tmp_path / "v.onnx", x), run_onnx(runs / "q/model.onnx", x)
    assert np.abs(a - b).max() < 0.02 * np.abs(a).max()


def test_export_fails_with_code_1(sparsebit, runs, tmp_path, monkeypatch):
    from sparsebit.errors import ExportError

    def fail(*args, **kwargs):
        raise ExportError("it differs\n  kept as x.failed.onnx")

    monkeypatch.setattr(library.QuantModel, "export_onnx", fail)
    done = sparsebit("export", runs / "q", "-o", tmp_path / "v.onnx")
    assert done.code == 1 and done.err == "error: it differs; kept as x.failed.onnx\n"


def test_tune_measures_and_keeps_model_and_file_together(sparsebit, work):
    pytest.importorskip("onnxruntime")
    command = "quantize net.py:build --data x.npy --batch-size 4 --tune -o tuned"
    done = sparsebit(command)
    assert done.code == 0 and "tuned on this machine" in done.out
    assert sparsebit("verify tuned").code == 0
    assert (
        "Where the time goes" in (work / "tuned" / "report.html").read_text("utf-8")
        or "so the file is float" in done.out
    )


def test_tune_needs_onnxruntime(sparsebit, work):
    words = "quantize net.py:build --data x.npy --tune -o tuned"
    for more in ("--set BACKEND=openvino", "--no-export"):
        done = sparsebit(f"{words} {more}")
        assert done.code == 2 and "--tune" in done.err and not (work / "tuned").exists()
