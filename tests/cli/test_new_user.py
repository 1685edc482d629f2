"""What a new user ran into on the command line, each by its name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_bad_inputs import refused

import sparsebit as library
from sparsebit.cli.runs.slower import warn_if_slower
from sparsebit.export.certificate import runtime

MORE = """
import torch
from net import build


def half(): return build().half()
def bfloat(): return build().bfloat16()
def scripted(): return torch.jit.script(build())
def traced(): return torch.jit.trace(build().eval(), torch.randn(1, 3, 8, 8))
def training(): return build().train()


def ones():
    torch.manual_seed(0)
    return [(torch.randn(1, 3, 8, 8), torch.tensor([i % 5])) for i in range(9)]


def odd(): return [torch.randn(4, 3, 8, 8), torch.randn(4, 1, 8, 8)]
def pixels(): return [(torch.randint(0, 256, (20, 3, 8, 8)).float(), torch.full((20,), 4))]
def wrong_keys(): return [{"image": torch.randn(4, 3, 8, 8)}]
def other_keys(): return [{"input": torch.randn(4, 3, 8, 8)}, {"image": torch.randn(4, 3, 8, 8)}]
def doubles(): return [torch.randn(4, 3, 8, 8).double()]
def used_up():
    batches = iter([torch.randn(4, 3, 8, 8)])
    list(batches)
    return batches
"""


@pytest.fixture
def more(work) -> Path:
    (work / "more.py").write_text(MORE)
    return work


def test_the_bare_command_ended_with_an_empty_error(sparsebit):
    for words in ("", "config", "llm"):
        done = sparsebit(words) if words else sparsebit(*[])
        assert done.code == 0 and "Usage" in done.out and not done.err


# -- check -----------------------------------------------------------------------------------------------
def test_check_scrolled_its_summary_away(sparsebit, work):
    done = sparsebit("check net.py:build --input-shape 2,3,8,8")
    lines = done.out.rstrip().splitlines()
    assert done.code == 0 and len(lines) <= 25
    assert lines[-1] == "more         --verbose shows every op and every layer"
    assert any(line.startswith("MACs ") for line in lines[-8:])
    full = sparsebit("check net.py:build --input-shape 2,3,8,8 --verbose").out.rstrip().splitlines()
    assert len(full) > len(lines) and any(line.startswith("MACs ") for line in full[-8:])
    assert any(line.startswith("0 ") and "Conv2d" in line for line in full)  # by its path, not `_0`
    assert not any(line.startswith("_0 ") or "into _0" in line for line in full)


# -- the batch of the file -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "command",
    [
        "quantize net.py:build --data more.py:ones -o r",
        "prune net.py:build --input-shape 1,3,8,8 --ratio 0.5 -o r",
    ],
)
def test_batches_of_one_fixed_the_file_to_one_sample(sparsebit, more, command):
    pytest.importorskip("onnxruntime")
    done = sparsebit(command)
    assert done.code == 0, done.err
    session = runtime.session(more / "r/model.onnx")
    (given,) = session.get_inputs()
    assert given.shape == ["batch", 3, 8, 8]
    x = np.random.default_rng(0).normal(size=(3, 3, 8, 8)).astype(np.float32)
    together = session.run(None, {given.name: x})[0]
    alone = [session.run(None, {given.name: one[None]})[0] for one in x]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-4, atol=1e-5)


def test_a_batch_of_one_is_fixed_when_that_is_asked_for(sparsebit, more):
    pytest.importorskip("onnxruntime")
    assert sparsebit("quantize net.py:build --data more.py:ones --fixed-batch -o r").code == 0
    assert runtime.session(more / "r/model.onnx").get_inputs()[0].shape == [1, 3, 8, 8]


# -- data ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", ["w8a8", "w4a8-adaround"])
def test_a_second_batch_with_other_channels_was_a_defect_of_sparsebit(sparsebit, more, preset):
    words = ["more.py:odd: batch 1: the model does not run on it", "4x1x8x8", "batch 0, which ran"]
    refused(sparsebit, more, f"quantize net.py:build --data more.py:odd -p {preset} -o r", *words)


def test_a_second_batch_with_other_channels_is_named_in_python():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1))
    with pytest.raises(library.errors.CalibrationError, match=r"batch 1: .* float32 2x5x4x4, and batch 0"):
        library.quantize(net, [torch.randn(2, 3, 4, 4), torch.randn(2, 5, 4, 4)], progress=False)


def test_unnormalised_data_and_few_samples_passed_without_a_remark(sparsebit, more):
    done = sparsebit("quantize net.py:build --data more.py:pixels -o r --no-export")
    assert done.code == 0
    assert "more.py:pixels: values from 0 to 255 look like pixels that are not normalised" in done.err
    np.save("one.npy", np.zeros((1, 3, 8, 8), np.float32) + 0.5)
    done = sparsebit("quantize net.py:build --data one.npy -o s --no-export")
    assert done.code == 0 and "warning: one.npy: has 1 sample; ranges" in done.err
    done = sparsebit("quantize net.py:build --data x.npy -o t --no-export")
    assert done.code == 0 and not done.err


def test_a_float_model_that_only_guesses_is_doubted(caplog):
    from sparsebit.cli.runs.compare import measure_metric

    class Guess(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.one_hot(torch.zeros(len(x), dtype=torch.long), 10).float()

    wrong = [(torch.randn(16, 3), torch.full((16,), 7))]
    assert measure_metric(Guess(), Guess(), wrong, None)["float"] == 0
    assert "the float model itself has a top-1 of 0 %, about chance for 10 classes" in caplog.text
    caplog.clear()
    measure_metric(Guess(), Guess(), [(torch.randn(16, 3), torch.zeros(16, dtype=torch.long))], None)
    assert not caplog.text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("wrong_keys", ["unexpected keyword argument 'image'"]),
        ("other_keys", ["batch 1", "image=float32", "input=float32"]),
        ("doubles", ["double"]),
        ("used_up", ["has no samples"]),
    ],
)
def test_more_mistakes_with_data(sparsebit, more, data, words):
    refused(sparsebit, more, f"quantize net.py:build --data more.py:{data} -o r", f"more.py:{data}", *words)


def test_a_model_in_train_mode_is_quantized_as_in_eval_mode(sparsebit, more):
    codes = [sparsebit(f"quantize {m} --data x.npy -o {o} --no-export").code for m, o in MODES]
    weights = [(more / o / "model.safetensors").read_bytes() for _, o in MODES]
    assert codes == [0, 0] and weights[0] == weights[1]


MODES = (("net.py:build", "a"), ("more.py:training", "b"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(sparsebit, work):
    (work / "locked").mkdir(mode=0o500)
    refused(sparsebit, work, "quantize net.py:build --data x.npy -o locked/r", "cannot be written to")


# -- models ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["scripted", "traced"])
def test_torchscript_ended_in_an_internal_error(sparsebit, more, name):
    words = [f"more.py:{name}: is compiled TorchScript", "pass the nn.Module"]
    refused(sparsebit, more, f"check more.py:{name} --input-shape 1,3,8,8", *words)
    refused(sparsebit, more, f"quantize more.py:{name} --data x.npy -o r", *words)


def test_torchscript_is_refused_in_python_and_as_a_file(sparsebit, more):
    model = torch.jit.trace(torch.nn.Linear(4, 4), torch.randn(1, 4))
    for door in (library.QuantModel, library.SparseModel):
        with pytest.raises(library.errors.SparsebitError, match="is compiled TorchScript"):
            door(model)
    with pytest.raises(library.errors.SparsebitError, match="is compiled TorchScript"):
        library.prune(model, torch.randn(1, 4))
    torch.jit.save(model, "script.pt")
    refused(sparsebit, more, "check script.pt --input-shape 1,4", "is compiled TorchScript")
    command = "check net.py:build --weights script.pt --input-shape 1,3,8,8"
    refused(sparsebit, more, command, "is compiled TorchScript")


@pytest.mark.parametrize("door", [library.QuantModel, library.SparseModel], ids=["QuantModel", "SparseModel"])
def test_layers_without_a_shape_are_named(door):
    with pytest.raises(
        library.errors.SparsebitError, match=r"0\.weight has no shape yet; run the model once"
    ):
        door(torch.nn.Sequential(torch.nn.LazyLinear(3)))


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_models_in_half_precision_did_not_export(sparsebit, more, name):
    pytest.importorskip("onnxruntime")
    done = sparsebit(f"quantize more.py:{name} --data x.npy -o r")
    assert done.code == 0, done.err
    assert (
        f"more.py:{name}: is {'float16' if name == 'half' else 'bfloat16'}; it is taken as float32"
        in done.err
    )
    assert runtime.session(more / "r/model.onnx").get_inputs()[0].type == "tensor(float)"


def test_a_jpeg_as_weights_was_a_pickle_that_wants_to_run_code(sparsebit, work):
    Image = pytest.importorskip("PIL.Image")
    Image.new("RGB", (32, 32), (200, 30, 60)).save("cat.jpg")
    command = "check net.py:build --weights cat.jpg --input-shape 1,3,8,8"
    refused(sparsebit, work, command, "cat.jpg: is not a file of weights")


# -- results ---------------------------------------------------------------------------------------------
def test_verify_of_a_folder_said_no_such_file(sparsebit, runs, work):
    done = sparsebit("verify", runs / "q")
    assert done.code == 0 and "certificate      holds" in done.out
    refused(sparsebit, work, "verify nowhere", "nowhere: no such file")
    (work / "empty").mkdir()
    refused(sparsebit, work, "verify empty", "is not a folder of a run", "--run")


def test_the_summary_always_shows_sqnr_against_float(sparsebit, more):
    done = sparsebit("quantize net.py:build --data x.npy -o r --no-export --json")
    assert 20 < json.loads(done.out)["sqnr"]["db"] < 100
    done = sparsebit("quantize net.py:build --data x.npy -o s --no-export")
    assert "dB against float, on 12 samples" in done.out


A = {
    "QSCHEME": "per-tensor-affine",
    "QUANTIZER": {"BIT": 8, "DISABLE": False},
    "QADD": {"ENABLE_QUANT": True},
}
CONFIG = {"BACKEND": "onnxruntime", "W": {"QUANTIZER": {"BIT": 8}}, "A": A}
FULL = {"totals": {"macs": 10, "integer_macs": 10}, "islands": [], "rows": []}
REASONS = {
    "backend": ({**CONFIG, "BACKEND": "tensorrt"}, FULL, "--preset w8a8 is for onnxruntime"),
    "weights only": (
        {**CONFIG, "A": {**A, "QUANTIZER": {"BIT": 8, "DISABLE": True}}},
        FULL,
        "activations stay float",
    ),
    "4 bits": ({**CONFIG, "W": {"QUANTIZER": {"BIT": 4}}}, FULL, "integer kernels for 8 bits"),
    "symmetric": (
        {**CONFIG, "A": {**A, "QSCHEME": "per-tensor-symmetric"}},
        FULL,
        "--set A.QSCHEME=per-tensor-affine",
    ),
    "islands": (CONFIG, {**FULL, "islands": [{}]}, "--trace export"),
    "additions": (
        {**CONFIG, "A": {**A, "QADD": {"ENABLE_QUANT": False}}},
        {**FULL, "rows": [{"op": "Add"}]},
        "--set A.QADD.ENABLE_QUANT=true",
    ),
    "float kernels": (CONFIG, {**FULL, "totals": {"macs": 10, "integer_macs": 1}}, "only 10 % of the MACs"),
    "processor": (CONFIG, FULL, "--preset w8"),
}


def run_of(folder, command, settings, times):
    steps = {"latency": {"milliseconds": times}}
    about = {"settings": settings, "steps": steps}
    return SimpleNamespace(command=command, about=about, folder=folder, done=steps.__contains__)


@pytest.mark.parametrize("case", REASONS)
def test_slower_than_float_was_not_a_warning(case, tmp_path, caplog):
    config, layers, words = REASONS[case]
    (tmp_path / "layers.json").write_text(json.dumps(layers))
    settings = {"config": config, "trace": "fx"}
    warn_if_slower(run_of(tmp_path, "quantize", settings, {"float": 10.0, "new": 9.0}))
    assert not caplog.text
    warn_if_slower(run_of(tmp_path, "quantize", settings, {"float": 10.0, "new": 15.0}))
    assert "slower than the float one, 1.50 x its time" in caplog.text and words in caplog.text


def test_a_pruned_model_that_is_slower_is_warned_of(tmp_path, caplog):
    for round_to, words in ((1, "try --round-to 8"), (0, "--latency")):
        caplog.clear()
        warn_if_slower(run_of(tmp_path, "prune", {"round_to": round_to}, {"float": 1.0, "new": 1.5}))
        assert words in caplog.text
