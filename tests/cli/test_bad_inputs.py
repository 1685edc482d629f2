"""Whatever is wrong on a command line: exit code 2, one line that says where and what to do, nothing half-written."""

from __future__ import annotations

import errno
import importlib.util
import os
import pickle
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_files import state


class Bomb:
    """A pickle that leaves a trace when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def refused(sparsebit, work: Path, command: str, *words: str) -> None:
    """`words` must all be in the one line."""
    before = sorted(work.rglob("*"))
    done = sparsebit(command)
    lines = [line for line in done.err.splitlines() if line.strip()]
    assert done.code == 2, (done, command)
    assert len(lines) == 1 and lines[0].startswith("error: "), done.err
    assert not [word for word in words if word not in lines[0]], lines[0]
    left = [p for p in sorted(work.rglob("*")) if "__pycache__" not in p.parts and p not in before]
    assert not left, f"left behind: {left}"


# -- models ----------------------------------------------------------------------------------------------
MODELS = {
    "no.py:build": ["no.py: no such file"],
    "net.py": ["net.py: which function", "net.py:name"],
    "net.py:biuld": ["has no 'biuld'", "did you mean build?"],
    "net.py:fails": ["net.py:fails: failed at net.py line", "ValueError: no such checkpoint"],
    "net.py:a_dict": ["gave a dict", "nn.Module"],
    "net.py:THREE": ["is a int, not a function"],
    "syntax.py:build": ["syntax.py:build: failed at line 2", "SyntaxError"],
    "imports.py:build": ["failed at imports.py line 1", "No module named 'nowhere'"],
    "quits.py:build": ["failed at quits.py line 1", "SystemExit"],
    "nowhere.module:build": ["No module named 'nowhere'"],
    "net:nothing_here": ["has no 'nothing_here'"],
    "resnet18": ["is not a model", "timm:name"],
    "weights.pth": ["holds weights, not a model", "--weights weights.pth"],
    "model.onnx": ["an ONNX file cannot be quantized"],
    "timm:": ["timm:: which model?", "timm:name"],
    "old": ["old: is the folder of a run; name the model"],
    "lazy.py:build": ["lazy.py:build: 0.weight has no shape yet; run the model once"],
    "hf:no/folder": ["is not a folder with a config.json"],
    "no.pt2": ["no.pt2: no such file"],
    "broken.pt2": ["broken.pt2: is not an exported program that can be read safely"],
}


@pytest.mark.parametrize("model", MODELS)
def test_models(sparsebit, work, model):
    (work / "syntax.py").write_text("import torch\ndef build(:\n")
    (work / "imports.py").write_text("import nowhere\n")
    (work / "quits.py").write_text("raise SystemExit('bye')\n")
    (work / "lazy.py").write_text(
        "from torch import nn\ndef build(): return nn.Sequential(nn.LazyConv2d(4, 3))\n"
    )
    (work / "old").mkdir()
    (work / "old/run.json").write_text("{}")
    (work / "broken.pt2").write_bytes(b"PK\x03\x04 not a zip")
    refused(sparsebit, work, f"check {model} --input-shape 2,3,8,8", *MODELS[model])


@pytest.mark.parametrize("package", ["timm", "torchvision", "transformers"])
def test_missing_packages(sparsebit, work, monkeypatch, package):
    hide(monkeypatch, package)
    (work / "hf").mkdir()
    (work / "hf/config.json").write_text("{}")
    model = "hf:hf" if package == "transformers" else f"{package}:resnet18"
    refused(sparsebit, work, f"check {model} --input-shape 2,3,8,8", f"pip install {package}")


@pytest.mark.parametrize("command", ["export q -o new.onnx", "verify q/model.onnx"])
def test_missing_onnx(sparsebit, work, runs, monkeypatch, command):
    hide(monkeypatch, "onnxruntime")
    os.symlink(runs / "q", work / "q")
    refused(sparsebit, work, command, "onnxruntime", "pip install 'sparsebit[onnx]'")


def test_missing_pillow(sparsebit, work, monkeypatch):
    hide(monkeypatch, "PIL")
    (work / "images").mkdir()
    command = "quantize net.py:build --data images --input-shape 1,3,8,8 -o run"
    refused(sparsebit, work, command, "pip install pillow")


def test_missing_sklearn(sparsebit, work, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    refused(sparsebit, work, "demo", "scikit-learn", "pip install 'sparsebit[demo]'")


def hide(monkeypatch, package: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest)
    )


def test_a_hostile_exported_program_is_not_run(sparsebit, work):
    """torch.export.load falls back to full pickles; here it must not."""
    model = torch.nn.Linear(3, 2)
    torch.export.save(torch.export.export(model, (torch.randn(1, 3),)), work / "good.pt2")
    bomb = work / "bomb"
    torch.save(Bomb(), bomb)
    with zipfile.ZipFile(work / "good.pt2") as good, zipfile.ZipFile(work / "evil.pt2", "w") as evil:
        for item in good.infolist():
            data = good.read(item)
            evil.writestr(item, bomb.read_bytes() if "sample_inputs" in item.filename else data)
    refused(sparsebit, work, "check evil.pt2 --input-shape 1,3", "evil.pt2: is not an exported program")
    assert not (work / "exploded").exists()


# -- weights ---------------------------------------------------------------------------------------------
def _weights(work: Path, kind: str) -> str:
    path = work / ("w.safetensors" if kind.startswith("safe") or kind in SAFE else "w.pth")
    if kind in SAFE:
        return str(state(work, "w.safetensors", **SAFE[kind]))
    if kind == "safetensors cut":
        path.write_bytes(state(work).read_bytes()[:-40])
        (work / "net.safetensors").unlink()
    elif kind == "torch cut":
        torch.save({"0.weight": torch.randn(500)}, path)
        path.write_bytes(path.read_bytes()[:600])
    elif kind == "bomb":
        torch.save({"0.weight": Bomb()}, path)
    elif kind == "plain pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    elif kind == "list":
        torch.save([torch.randn(3)], path)
    elif kind == "numbers":
        torch.save({"epoch": 3}, path)
    elif kind == "folder":
        (work / "weights").mkdir()
        return "weights"
    elif kind in ("empty", "safe empty"):
        path.write_bytes(b"")
    return path.name


SAFE = {
    "nan": {"0.weight": torch.full((8, 3, 3, 3), float("nan"))},
    "infinite": {"7.bias": torch.tensor([1, 2, float("inf"), 3, 4.0])},
    "shape": {"0.weight": torch.zeros(4, 3, 3, 3)},
    "unknown": {"head.weight": torch.zeros(3)},
}
WEIGHTS = {
    "nan": ["0.weight has 216 of 216 values that are NaN or infinite"],
    "infinite": ["7.bias has 1 of 5 values"],
    "shape": ["0.weight has the shape (4, 3, 3, 3), the model wants (8, 3, 3, 3)"],
    "unknown": ["1 unknown to it (head.weight)"],
    "missing file": ["w.pth: no such file"],
    "safetensors cut": ["w.safetensors: is broken"],
    "torch cut": ["w.pth: is broken"],
    "bomb": ["wants to run code, so it is refused", "state_dict"],
    "plain pickle": ["w.pth:", "refused"],
    "list": ["holds a list", "state_dict"],
    "numbers": ["epoch is a int", "state_dict"],
    "folder": ["weights: is a folder; name the file"],
    "empty": ["w.pth: is broken"],
    "safe empty": ["w.safetensors: is broken"],
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights(sparsebit, work, kind):
    name = _weights(work, kind)
    refused(sparsebit, work, f"check net.py:build --weights {name} --input-shape 2,3,8,8", *WEIGHTS[kind])
    assert not (work / "exploded").exists()


# -- data ------------------------------------------------------------------------------------------------
DATA = {
    "no.npy": ["no.npy: no such file or folder", "file.py:loader"],
    "cut.npy": ["cut.npy: cannot be read"],
    "cut.npz": ["cut.npz: is broken"],
    "objects.npy": ["objects are pickled in it"],
    "words.npy": ["not numbers"],
    "none.npy": ["none.npy: has no samples"],
    "number.npy": ["number.npy: holds a single number"],
    "pixels.npy": ["whole numbers: give floats as in training", "colours on axis 1"],
    "nan.npy": ["nan.npy: batch 1 has values that are NaN or infinite"],
    "small.npy": ["net.py:build does not run on inputs of shape (8, 8, 8)"],
    "lengths.npz": ["arrays of different lengths: 3, 4"],
    "data.pkl": ["pickles can run code, so they are refused"],
    "data.xyz": ["data.xyz", "file.py:loader"],
    "text.txt": ["text needs a tokenizer", "hf:DIR"],
    "empty": ["empty: no images in it"],
    "images": ["images/broken.png: is not an image that can be read"],
    "net.py:batch": ["did you mean batches?"],
    "net.py:fails": ["net.py:fails: failed", "no such checkpoint"],
    "net.py:nothing": ["net.py:nothing: has no samples"],
    "net.py:THREE": ["gave a int", "batches"],
}


@pytest.fixture
def bad_data(work) -> Path:
    x = np.load(work / "x.npy")
    (work / "cut.npy").write_bytes((work / "x.npy").read_bytes()[:200])
    (work / "cut.npz").write_bytes((work / "xy.npz").read_bytes()[:300])
    np.save(work / "objects.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    np.save(work / "words.npy", np.array(["a", "b"]))
    np.save(work / "none.npy", x[:0])
    np.save(work / "number.npy", np.float32(3))
    np.save(work / "pixels.npy", np.zeros((4, 8, 8, 3), np.uint8))
    np.save(work / "small.npy", x[:, 0])
    x[9, 0, 0, 0] = np.nan
    np.save(work / "nan.npy", x)
    np.savez(work / "lengths.npz", a=x[:3], b=x[:4])
    for name in ("data.pkl", "data.xyz", "text.txt"):
        (work / name).write_text("abc")
    for name in ("empty", "images"):
        (work / name).mkdir()
    (work / "images/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return work


@pytest.mark.parametrize("data", DATA)
def test_data(sparsebit, bad_data, data):
    shape = "--input-shape 1,3,8,8" if data in ("empty", "images") else ""
    command = f"quantize net.py:build --data {data} {shape} -o run"
    refused(sparsebit, bad_data, command, *DATA[data])
    assert not (bad_data / "exploded").exists()


INPUTS = {
    "": ["--data", "--input-shape such as 1,3,224,224"],
    "--input-shape 1,three": ["--input-shape: expected sizes such as", "'1,three'"],
    "--input-shape 0,3,8,8": ["--input-shape: expected sizes"],
    "--input-shape 2,4,8,8": ["--input-shape 2,4,8,8: net.py:build does not run", "(2, 4, 8, 8)"],
    "--data x.npy --input-shape 1,3,16,16": ["x.npy: its samples have the shape 3x8x8", "asks for 3x16x16"],
    "--data images": ["images of which size?", "--input-shape"],
    "--data images --input-shape 1,4,8,8": ["images: an image has 1 or 3 channels, --input-shape asks for 4"],
}


@pytest.mark.parametrize("options", INPUTS)
def test_inputs(sparsebit, work, options):
    (work / "images").mkdir()
    refused(sparsebit, work, f"check net.py:build {options}", *INPUTS[options])


def test_names_of_arrays(sparsebit, work):
    np.savez(work / "pair.npz", right=np.zeros((4, 6)), wrong=np.zeros((4, 6)))
    command = "quantize net.py:Pair --data pair.npz -o run"
    refused(sparsebit, work, command, "wrong is not an argument of the model; it takes left, right")


@pytest.mark.parametrize("option", ["--batch-size 0", "--samples -1"])
def test_numbers(sparsebit, work, option):
    command = f"quantize net.py:build --data x.npy {option} -o run"
    refused(sparsebit, work, command, option.split()[0], "must be at least 1")


# -- configs ---------------------------------------------------------------------------------------------
CONFIGS = {
    "W: {QUANTIZER: {BITS: 4}}": ["W.QUANTIZER.BITS: unknown option; did you mean BIT?", "in qconfig.yaml"],
    "W: {QUANTIZER: {BIT: four}}": ["W.QUANTIZER.BIT: expected an integer, got 'four'"],
    "W: {QUANTIZER: {BIT: 40}}": ["W.QUANTIZER.BIT: must be less than or equal to 16, got 40"],
    "A: {OBSERVER: {TYPE: mimax}}": ["A.OBSERVER.TYPE", "did you mean minmax?"],
    "A: {OBSERVER: {PERCENTILE: {ALFA: 1}}}": ["A.OBSERVER.PERCENTILE.ALFA", "did you mean ALPHA?"],
    "A: {QSCHEME: per-tensor}": ["A.QSCHEME: 'per-tensor' is not one of", "per-tensor-affine"],
    "BACKEND: tensort": ["BACKEND", "did you mean tensorrt?"],
    "{BACKEND: tensorrt, A: {QSCHEME: per-tensor-affine}}": ["A.QSCHEME: tensorrt has no zero points"],
    "SCHEDUL: {FUSE_BN: true}": ["SCHEDUL: unknown option; did you mean SCHEDULE?"],
    "W: 8": ["W: expected a section of options"],
    "BACKEND: [": ["qconfig.yaml: line 1", "not valid YAML"],
    "- W": ["qconfig.yaml: expected options (KEY: value), got a list"],
    "": ["qconfig.yaml: the file is empty"],
    "SPARSER: {RATIO: 2}": ["SPARSER.RATIO", "got 2"],
    "SPARSER: {STRATEGY: l1nrm}": ["SPARSER.STRATEGY", "did you mean l1norm?"],
}


@pytest.mark.parametrize("text", CONFIGS)
def test_config_files(sparsebit, work, text):
    (work / "qconfig.yaml").write_text(text)
    refused(sparsebit, work, "config check qconfig.yaml", *CONFIGS[text])
    if "SPARSER" not in text:
        command = "quantize net.py:build --data x.npy --config qconfig.yaml -o run"
        refused(sparsebit, work, command, *CONFIGS[text])


OPTIONS = {
    "--config no.yaml": ["no.yaml: no such file"],
    "--config .": ["--config .: is a folder"],
    "--preset w8a9": ["--preset w8a9: no such preset; did you mean w8a8?"],
    "--preset w8a8 --config c.yaml": ["--config and --preset: give one of them"],
    "--set W.QUANTIZER.BIT": ["--set W.QUANTIZER.BIT: expected KEY=VALUE"],
    "--set W.QUANTIZER.BITS=4": ["W.QUANTIZER.BITS: unknown option; did you mean BIT?"],
    "--set W.QUANTIZER.BIT=[": ["'[' is not a YAML value"],
    "--presett w8a8": ["--presett", "sparsebit quantize --help"],
    "--batch-size many": ["--batch-size"],
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options(sparsebit, work, options):
    command = f"quantize net.py:build --data x.npy {options} -o run"
    refused(sparsebit, work, command, *OPTIONS[options])


# -- pruning ---------------------------------------------------------------------------------------------
PRUNING = {
    "--ratio 1.5": ["ratio: must be at least 0 and below 1, got 1.5"],
    "--macs 2": ["macs: must be above 0 and at most 1, got 2"],
    "--macs 0.0001": ["macs: 0.0001 cannot be reached"],
    "--latency 2": ["latency: must be above 0 and at most 1, got 2"],
    "--macs 0.5 --params 0.5": ["one of ratio, macs, params"],
    "--ratio 0.5 --latency 0.5": ["one of ratio, macs, params and latency"],
    "--sparser l1nrm": ["--sparser l1nrm: no such sparser; did you mean l1norm?"],
    "--sparser wanda": ["--sparser wanda: decides by data; add --data"],
    "--sparser sparsegpt": ["--sparser sparsegpt: removes single weights, and this command channels"],
    "--merge 1": ["--merge: layers are fitted to data; add --data"],
    "--data x.npy --depth -1": ["depth: must be at least 0, got -1"],
    "--data x.npy --depth layer9": ["depth: there is no layer9"],
    "--heads hole": ["SPARSER.HEADS", "hole", "whole"],
    "--scope all": ["SPARSER.SCOPE", "all", "global"],
}


@pytest.mark.parametrize("options", PRUNING)
def test_pruning(sparsebit, work, options):
    shape = "" if "--data" in options else "--input-shape 2,3,8,8"
    refused(sparsebit, work, f"prune net.py:build {shape} {options} -o run", *PRUNING[options])


# -- output ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["quantize", "prune"])
@pytest.mark.parametrize(
    "output, word", [("x.npy", "is a file"), ("x.npy/run", "is a file"), ("full", "is not empty")]
)
def test_output_is_taken(sparsebit, work, command, output, word):
    (work / "full").mkdir()
    (work / "full/notes.txt").write_text("mine")
    refused(sparsebit, work, f"{command} net.py:build --data x.npy -o {output}", f"--output {output}", word)
    assert (work / "full/notes.txt").read_text() == "mine"


def test_read_only_output(sparsebit, work, monkeypatch):
    """Root may write everywhere, so the answer of the system is given here."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    refused(sparsebit, work, "quantize net.py:build --data x.npy -o run", "cannot be written to")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no folders")
def test_folder_that_cannot_be_made(sparsebit, work):
    refused(sparsebit, work, "quantize net.py:build --data x.npy -o /proc/run", "/proc/run")


@pytest.mark.parametrize("place", ["sparsebit.quantization.checkpoint", "sparsebit.cli.runs.run"])
def test_full_disk(sparsebit, work, monkeypatch, place):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(f"{place}.write_whole", full)
    refused(sparsebit, work, "quantize net.py:build --data x.npy -o new/run", "No space left on device")


# -- runs and other commands ----------------------------------------------------------------------------------
RUNS = {
    "export nowhere": ["nowhere: no such folder"],
    "export .": ["is not a folder of a run: it has no run.json"],
    "export broken": ["broken/run.json: is broken"],
    "export half": ["half: its quantize is not finished", "--resume"],
    "export q": ["q/model.onnx: already exists"],
    "export q --backend tensort -o a.onnx": ["--backend tensort: no such backend; did you mean tensorrt?"],
    "export p --backend openvino -o a.onnx": ["--backend: only quantized models"],
    "export q -o no/folder/a.onnx": ["the folder no/folder does not exist"],
    "verify no.onnx": ["no.onnx: no such file"],
    "verify x.npy": ["x.npy: . is not a folder of a run", "--run"],
    "verify .": ["is not a folder of a run", "--run"],
    "verify x.npy --run q": ["x.npy: is broken or no ONNX file"],
    "verify q/model.onnx --run p": ["q/model.onnx: holds a quantized model"],
    "verify p/model.onnx --run q": ["holds an ordinary model"],
    "profile p": ["is a run of prune"],
    "profile q --batches 0": ["--batches"],
    "report nowhere": ["nowhere: is not a folder of a run"],
    "report broken": ["broken/run.json: is broken"],
    "report q --format pdf": ["pdf"],
    "report q -o x.npy": ["x.npy: already exists"],
    "config init -o x.npy": ["x.npy: already exists"],
    "list observer": ["observer"],
    "quantise": ["quantise"],
    "quantize net.py:build --data x.npy": ["--output"],
    "quantize net.py:build -o run": ["--data: quantization needs"],
    "quantize net.py:build --data x.npy -o q": ["holds a run already", "--resume"],
    "quantize net.py:build --data x.npy -o q --resume": ["was started with another"],
}


@pytest.mark.parametrize("command", RUNS)
def test_runs(sparsebit, work, runs, command):
    os.symlink(runs / "q", work / "q")
    os.symlink(runs / "p", work / "p")
    for name, text in (("broken", "{"), ("half", '{"command": "quantize", "settings": {}, "steps": {}, ')):
        (work / name).mkdir()
        inputs = '"inputs": {"model": "net.py:build"}, "sparsebit": "1"}' if name == "half" else ""
        (work / name / "run.json").write_text(text + inputs)
    refused(sparsebit, work, command, *RUNS[command])


@pytest.mark.parametrize(
    "name, word", [("model.safetensors", "is broken"), ("plan.json", "not a pruning plan")]
)
def test_pruned_runs_that_broke(sparsebit, work, runs, name, word):
    damage(shutil.copytree(runs / "p", work / "p") / name)
    refused(sparsebit, work, "export p -o a.onnx", f"p/{name}", word)


@pytest.mark.parametrize("command", ["export q -o a.onnx", "profile q", "verify q/model.onnx"])
def test_quantized_runs_that_broke(sparsebit, work, runs, command):
    damage(shutil.copytree(runs / "q", work / "q") / "model.safetensors")
    refused(sparsebit, work, command, "q: does not fit", "net.py:build")


@pytest.mark.parametrize("name", ["layers.json", "run.json"])
def test_reports_of_runs_that_broke(sparsebit, work, runs, name):
    damage(shutil.copytree(runs / "q", work / "q") / name)
    refused(sparsebit, work, "report q -o a.html", f"q/{name}: is broken")


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize("command", ["quantize", "prune"])
def test_a_model_that_changed_since_its_run(sparsebit, work, command):
    assert sparsebit(f"{command} net.py:build --data x.npy --no-export -o run").code == 0
    text = (work / "net.py").read_text()
    (work / "net.py").write_text(
        text.replace("(3, 8, 3", "(3, 12, 3").replace("(8, 8,", "(12, 8,").replace("2d(8)", "2d(12)")
    )
    refused(sparsebit, work, "export run", "net.py:build" if command == "quantize" else "another model")


def test_errors_are_json_too(sparsebit, work):
    import json

    done = sparsebit("check", "no.py:build", "--input-shape", "1,3,8,8", "--json")
    assert done.code == 2
    assert json.loads(done.out) == {"ok": False, "error": "no.py: no such file"}


# -- metrics ---------------------------------------------------------------------------------------------
METRICS = {
    "net.py:acuracy": ["net.py:acuracy: net.py has no 'acuracy'"],
    "net.py:THREE": ["--metric net.py:THREE: is not a function", "(model, batches)"],
    "no.py:metric": ["no.py: no such file"],
}


@pytest.mark.parametrize("metric", METRICS)
def test_metrics(sparsebit, work, metric):
    command = f"quantize net.py:build --data x.npy --no-export --metric {metric} -o run"
    refused(sparsebit, work, command, *METRICS[metric])


@pytest.mark.parametrize(
    "body, words", {"return 'good'": "gave a str", "raise KeyError('y')": "failed at"}.items()
)
def test_a_metric_that_fails_leaves_the_quantized_model(sparsebit, work, body, words):
    """It is called at the end: what is finished stays, and --resume goes on when the function is repaired."""
    source = (work / "net.py").read_text()
    (work / "net.py").write_text(f"{source}\n\ndef metric(model, batches):\n    {body}\n")
    command = "quantize net.py:build --data x.npy --no-export --metric net.py:metric -o run"
    done = sparsebit(command)
    assert done.code == 2 and words in done.err and "--metric" in done.err and "Traceback" not in done.err
    (work / "net.py").write_text(f"{source}\n\ndef metric(model, batches):\n    return 1.5\n")
    assert sparsebit(f"{command} --resume").code == 0
