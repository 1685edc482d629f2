"""export_module: any nn.Module to a file that is run and agrees; one that does not is refused and says where."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured
from torch.utils import _pytree as pytree

import sparsebit
from models import images, randomise, small_net
from sparsebit.errors import ExportError
from sparsebit.export import export_module as plain
from sparsebit.export import files
from sparsebit.export.certificate import runtime
from sparsebit.export.export_module import PlainCertificate, export_module

sys.path.append(str(Path(__file__).parent.parent / "sparse"))
from channel_nets import ARCHITECTURES

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class Calls(nn.Module):
    """A layer and any code behind it."""

    def __init__(self, code: Callable[[Tensor], object]):
        super().__init__()
        self.fc, self.code = nn.Linear(4, 6), code

    def forward(self, x: Tensor) -> object:
        return self.code(self.fc(x))


def run(path: Path, *inputs: Tensor) -> list[np.ndarray]:
    """As a user would: nothing of Sparsebit in it."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs)})


def assert_agrees(path: Path, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        expected = [t for t in pytree.tree_leaves(model.eval()(x)) if isinstance(t, Tensor)]
    got = run(path, x)
    assert len(got) == len(expected)
    for theirs, mine in zip(got, expected):
        torch.testing.assert_close(torch.from_numpy(theirs), mine, rtol=1e-4, atol=1e-5)


def weights_in(path: Path) -> int:
    return sum(int(np.prod(t.dims)) for t in onnx.load(path).graph.initializer if len(t.dims) > 1)


# -- what it writes ----------------------------------------------------------------------------------------
def test_conv_net_with_batches_of_other_sizes(tmp_path):
    net, path = small_net(), tmp_path / "m.onnx"
    batches = [images(1, batch=n)[0] for n in (2, 7)]
    report = export_module(
        net, images()[0], path, ["x"], ["logits"], {"x": {0: "n"}}, opset_version=20, batches=batches
    )
    assert report.ok and report.certificate.runtime.labels == 4 + 2 + 7
    assert onnx.load(path).opset_import[0].version == report.opset == 20
    assert_agrees(path, net, images(1, batch=3)[0])


def test_arguments_by_name_and_several_outputs(tmp_path):
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
            return {"sum": x + y if scale is None else x + y * scale, "first": x.argmax(-1)}

    x, y, scale = torch.randn(2, 3), torch.randn(2, 3), torch.rand(3)
    path = tmp_path / "m.onnx"
    export_module(Two(), {"scale": scale, "y": y, "x": x}, path)
    total, first = run(path, x, y, scale)
    np.testing.assert_allclose(total, (x + y * scale).numpy(), rtol=1e-6)
    assert np.array_equal(first, x.argmax(-1).numpy())
    export_module(Two(), (x, y), path)
    assert [i.name for i in onnx.load(path).graph.input] == ["x", "y"]


def _mean_too(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y.mean()


@pytest.mark.parametrize("kind", ["quantized", "pruned", "plain"])
def test_an_output_that_is_a_single_number(kind, tmp_path):
    torch.manual_seed(0)
    net, x, path = Calls(_mean_too).eval(), torch.randn(3, 4), str(tmp_path / "m.onnx")
    if kind == "plain":
        model, report = net, export_module(net, x, path)
    else:
        model = sparsebit.quantize(net, [x]) if kind == "quantized" else sparsebit.SparseModel(net, example=x)
        report = model.export_onnx(x, path)
    assert report.ok and sparsebit.verify(path, model, [x]).ok
    assert [y.ndim for y in run(Path(path), x)] == [2, 0]


NOT_IN_ONNX = {  # neither pruned nor whole
    "lstm with projections": "torch's exporter writes a file that onnxruntime refuses",
    "one head": "torch's exporter knows attention with four axes only",
    "nested": "torch's exporter loses inputs that are dicts of dicts",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_pruned(name, tmp_path):
    make, data = ARCHITECTURES[name]
    torch.manual_seed(0)
    net, x, path = randomise(make()), data(), tmp_path / "m.onnx"
    small = sparsebit.prune(net, x, 0.5)
    if name in NOT_IN_ONNX:
        for model in (net, small):
            with pytest.raises(ExportError):
                export_module(model, x, path)
        return
    report = export_module(small, x, path)
    assert report.ok and max(c.error for c in report.certificate.outputs.values()) < 1e-5
    if not isinstance(x, dict):
        assert_agrees(path, small, x)


@pytest.mark.parametrize("name", ["residual", "vit", "lstm"])
def test_as_written(name, tmp_path):
    make, data = ARCHITECTURES[name]
    net, path = randomise(make()), tmp_path / "m.onnx"
    export_module(net, data(), path)
    assert_agrees(path, net, data())


def test_the_file_of_a_pruned_model_is_smaller(tmp_path):
    net, x = small_net(channels=64), images()[0]
    small = sparsebit.prune(net, x, 0.5)
    whole, cut = export_module(net, x, tmp_path / "a.onnx"), export_module(small, x, tmp_path / "b.onnx")
    assert cut.bytes == (tmp_path / "b.onnx").stat().st_size < 0.4 * whole.bytes
    for path, model in ((tmp_path / "a.onnx", net), (tmp_path / "b.onnx", small)):
        assert weights_in(path) == sum(p.numel() for p in model.parameters() if p.dim() > 1)
        assert_agrees(path, model, images()[1])


def test_masks_are_multiplied_into_the_weights(tmp_path):
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    l1_unstructured(net[0], "weight", 0.5)
    path, x = tmp_path / "m.onnx", torch.randn(4, 6)
    export_module(net, x, path)
    assert_agrees(path, net, x)
    stored = [onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if len(t.dims) == 2]
    assert sorted((array.size, int((array == 0).sum())) for array in stored) == [(24, 0), (48, 24)]


def test_report_is_returned_printed_saved_and_in_the_file(tmp_path):
    path = tmp_path / "m.onnx"
    report = export_module(small_net(), images()[0], path, output_names=["logits"], batches=images())
    saved = json.loads((tmp_path / "m.report.json").read_text(), parse_constant=pytest.fail)
    assert saved["ok"] and saved["bytes"] == path.stat().st_size and not saved["quantizers"]
    assert saved["outputs"]["logits"]["error"] < 1e-5 < saved["outputs"]["logits"]["allowed"]
    text = str(report)
    for part in ("certificate      holds", "logits: within", "noise floor", "opset 18 (13 was asked"):
        assert part in text
    assert "quantizer" not in text and "integer" not in text
    assert json.loads({p.key: p.value for p in onnx.load(path).metadata_props}["sparsebit.certificate"])["ok"]
    assert b"stack_trace" not in path.read_bytes() and b".py" not in path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.report.json"]


def test_equal_outputs_make_a_report_that_json_can_hold(tmp_path):
    export_module(Calls(lambda x: x > 0), torch.randn(2, 4), tmp_path / "m.onnx")
    saved = json.loads((tmp_path / "m.report.json").read_text(), parse_constant=pytest.fail)
    assert saved["end_to_end"]["noise_db"] == "-inf"


def test_above_the_limit_of_protobuf(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LIMIT", 1000)
    net, path = small_net(), tmp_path / "m.onnx"
    export_module(net, images()[0], path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data", "m.report.json"]
    assert_agrees(path, net, images()[0])


# -- what it refuses ---------------------------------------------------------------------------------------
def broken(monkeypatch, damage: Callable[[object], None]) -> None:
    """An exporter whose graph is damaged."""
    to_program = plain.to_program

    def make(*args, **kwargs):
        program = to_program(*args, **kwargs)
        damage(program.model.graph)
        return program

    monkeypatch.setattr(plain, "to_program", make)


def wrong_weight(name: str, share: float) -> Callable[[object], None]:
    def damage(graph) -> None:
        import onnx_ir as ir

        value = graph.initializers[name]
        array = value.const_value.numpy().copy()
        array[:, 5] += share * np.abs(array).max()
        value.const_value = ir.tensor(array, name=name)

    return damage


def wrong_pads(graph) -> None:
    import onnx_ir as ir

    node = next(n for n in graph if n.op_type == "Conv" and "layer1.0.bn2" in str(n.metadata_props))
    node.attributes["pads"] = ir.AttrInt64s("pads", [2, 1, 0, 1])


@pytest.mark.parametrize("share", [1.0, 1e-2])
def test_a_wrong_weight_is_refused_and_named(tmp_path, monkeypatch, share):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"the old file")
    broken(monkeypatch, wrong_weight("fc.weight", share))
    with pytest.raises(
        ExportError, match=r"(?s)starts at fc: its value linear is off by.*kept as .*failed.on"
    ):
        export_module(small_net(), images()[0], path)
    assert path.read_bytes() == b"the old file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.failed.onnx", "m.failed.report.json", "m.onnx"]
    saved = json.loads((tmp_path / "m.failed.report.json").read_text())
    assert not saved["ok"] and saved["failures"][1].startswith("the output linear: off by")
    onnx.checker.check_model(str(tmp_path / "m.failed.onnx"))


def test_the_first_op_that_differs_is_named(tmp_path, monkeypatch):
    """Everything behind it differs too."""
    broken(monkeypatch, wrong_pads)
    with pytest.raises(ExportError, match=r"starts at layer1\.0\.bn2: its value"):
        export_module(small_net(), images()[0], tmp_path / "m.onnx", output_names=["logits"])


def test_an_output_that_the_user_named(tmp_path, monkeypatch):
    """Its value has another name in the file than in the exported program."""
    broken(monkeypatch, wrong_weight("fc.weight", 1.0))
    with pytest.raises(ExportError, match="starts at the last op before the outputs logits"):
        export_module(small_net(), images()[0], tmp_path / "m.onnx", output_names=["logits"])


def test_a_fault_of_the_optimised_runtime_is_told_apart(tmp_path, monkeypatch):
    session = runtime.session

    class Wrong:
        def __init__(self, loaded):
            self.loaded, self.get_inputs, self.get_outputs = loaded, loaded.get_inputs, loaded.get_outputs

        def run(self, names, given):
            return [out * 1.01 for out in self.loaded.run(names, given)]

    def faulty(path, optimised=True, save=None):
        return Wrong(session(path)) if optimised else session(path, optimised=False)

    monkeypatch.setattr(runtime, "session", faulty)
    with pytest.raises(ExportError, match="starts at an optimisation of onnxruntime"):
        export_module(small_net(), images()[0], tmp_path / "m.onnx")


def test_code_that_a_size_decides(tmp_path):
    net, x = Calls(lambda x: x if x.shape[0] > 1 else -x), torch.randn(3, 4)
    with pytest.raises(ExportError, match="starts at the tracing of the model"):
        export_module(net, x, tmp_path / "m.onnx", dynamic_axes={"x": {0: "n"}}, batches=[x[:1]])


def test_what_the_model_itself_amplifies_is_no_difference(tmp_path):
    """sin(2000 x): float rounding of the layer shows as 1e-3 and more, noise of 1e-5 as much more than that."""
    net, x = Calls(lambda x: (x * 2000).sin()), torch.randn(64, 4)
    report = export_module(net, x, tmp_path / "m.onnx")
    assert report.ok and report.certificate.outputs["sin"].floor > 1e-2
    assert "moves by" in report.notes[0]


def test_a_noise_floor_that_is_not_finite_allows_nothing():
    certificate, one = PlainCertificate(), np.ones((2, 3), np.float32)
    certificate.add(["y"], [one], [one * 1.1], [one * np.nan])
    assert len(certificate.failures()) == 1
    fewer = PlainCertificate()
    fewer.add(["y"], [one, one], [one], [one, one])
    assert len(fewer.failures()) == 1


# -- bad input: before any file is touched -----------------------------------------------------------------
def test_unwritable_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(plain, "to_program", None)  # refused before any work
    for path, reason in ((tmp_path, "is a folder"), (tmp_path / "no/m.onnx", "does not exist")):
        with pytest.raises(ExportError, match=reason):
            export_module(small_net(), images()[0], path)


def test_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ExportError, match=r"needs onnx, onnxscript, onnxruntime: pip install 'sparsebit\[onnx"
    ):
        export_module(small_net(), images()[0], tmp_path / "m.onnx")


def test_can_be_imported_without_onnx():
    code = (
        "import sys; sys.modules.update(onnx=None, onnx_ir=None, onnxruntime=None, onnxscript=None)\n"
        "import sparsebit.export.export_module as p; print(p.export_module.__name__)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "export_module", out.stderr


def eigenvalues(x: Tensor) -> Tensor:
    return torch.linalg.eigvals(x[:, :4]).abs()


state = [0]


def counted(x: Tensor) -> Tensor:
    state[0] += 1
    return x * state[0]


BAD = {
    "an op without translation": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Calls(eigenvalues))),
        r"cannot translate 1\.0.*linalg_eig",
    ),
    "a wrong dummy": (lambda: nn.Linear(5, 2), "dummy: the model does not run on it: RuntimeError: mat1 and"),
    "too few arguments": (lambda: nn.Bilinear(4, 4, 2), "dummy: the model does not run on it: TypeError"),
    "no module": (lambda: torch.relu, "model: expected an nn.Module"),
    "a script": (
        lambda: torch.jit.script(nn.Linear(4, 2)),
        "that is not scripted, got RecursiveScriptModule",
    ),
    "a number": (lambda: Calls(lambda x: {"y": x, "n": 3}), r"its output\['n'\] is 3, but a file gives only"),
    "random numbers": (lambda: Calls(lambda x: x + torch.rand(6)), "answers the same input differently"),
    "nothing": (lambda: Calls(lambda x: x[:0]), "no finite value for it, so there is nothing to compare"),
    "not a number": (lambda: Calls(lambda x: x.abs() / 0), "no finite value for it"),
    "state": (lambda: Calls(counted), "answers the same input differently"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bad_models(what, tmp_path, capfd):
    make, message = BAD[what]
    with pytest.raises(ExportError, match=message):
        export_module(make(), torch.randn(4, 4), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir()) and not capfd.readouterr().err


def test_bfloat16_is_written_in_float32_and_the_report_says_so(tmp_path):
    model = nn.Linear(4, 2).bfloat16()
    report = export_module(model, torch.randn(4, 4), tmp_path / "m.onnx")
    assert report.ok and any("bfloat16" in note for note in report.notes)
    assert model.weight.dtype is torch.bfloat16


def test_a_batch_of_another_size_says_what_to_do(tmp_path):
    with pytest.raises(ExportError, match="dynamic_axes"):
        export_module(Calls(torch.relu), torch.randn(2, 4), tmp_path / "m.onnx", batches=[torch.randn(3, 4)])
    with pytest.raises(ExportError, match="opset_version: 99 is not between"):
        export_module(Calls(torch.relu), torch.randn(2, 4), tmp_path / "m.onnx", opset_version=99)
    assert not list(tmp_path.iterdir())


# -- the model comes back ----------------------------------------------------------------------------------
@pytest.mark.parametrize("fails", [None, "to_program", "certify", "settle"])
def test_the_model_comes_back_as_it_was(tmp_path, monkeypatch, fails):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
            self.lstm = nn.LSTM(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(self.drop(self.bn(self.conv(x))).mean((2, 3)))[0]

    net, x = Net().train(), images()[0]
    net.bn.eval()
    net.conv.weight.requires_grad_(False)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    flags = [m.training for m in net.modules()]
    kept = [id(p) for p in net.parameters()] + [id(w) for w in net.lstm._flat_weights]
    if fails:
        monkeypatch.setattr(plain, fails, lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            export_module(net, x, tmp_path / "m.onnx")
        assert not list(tmp_path.iterdir())
    else:
        export_module(net, x, tmp_path / "m.onnx")
    assert [m.training for m in net.modules()] == flags
    assert [id(p) for p in net.parameters()] + [id(w) for w in net.lstm._flat_weights] == kept
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert [p.requires_grad for p in net.parameters()] == [False] + [True] * 7
    assert not any(m._forward_hooks for m in net.modules())


def test_the_dummy_comes_back_as_it_was(tmp_path):
    net, x = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)), torch.randn(3, 4)
    before = x.clone()
    assert export_module(net, x, tmp_path / "m.onnx").ok and torch.equal(x, before)
    np.testing.assert_allclose(run(tmp_path / "m.onnx", x)[0], net(before).detach().numpy(), atol=1e-6)
