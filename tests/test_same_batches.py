"""A batch means the same to quantize, preflight, prune, verify and the command line: `(x, y)` is x and its target."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import sparsebit
from models import small_net
from sparsebit.cli import main

FORMS = {
    "x": lambda x, y: x,
    "(x,)": lambda x, y: (x,),
    "(x, y)": lambda x, y: (x, y),
    "[x, y]": lambda x, y: [x, y],
    '{"x": x}': lambda x, y: {"x": x},
    '({"x": x}, y)': lambda x, y: ({"x": x}, y),
}


class Net(nn.Module):
    """A network whose forward names its input."""

    def __init__(self):
        super().__init__()
        self.body = small_net()

    def forward(self, x):
        return self.body(x)


def batches(form):
    torch.manual_seed(2)
    found = []
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8)
        found.append(FORMS[form](x, torch.zeros(4, dtype=torch.long)))
    return found


def same_state(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_quantize_and_preflight(form):
    want = sparsebit.quantize(Net(), batches("x"))
    got = sparsebit.quantize(Net(), batches(form))
    same_state(got.state_dict(), want.state_dict())
    first = batches(form)[0]
    assert str(sparsebit.preflight(Net(), first)) == str(sparsebit.preflight(Net(), batches("x")[0]))


@pytest.mark.parametrize("form", FORMS)
def test_prune(form):
    def pruned(name):
        given = batches(name)
        return sparsebit.prune(Net(), given[0], 0.5, batches=given)

    same_state(pruned(form).state_dict(), pruned("x").state_dict())


@pytest.mark.parametrize("form", FORMS)
def test_verify(form, tmp_path):
    pytest.importorskip("onnxruntime")
    qmodel = sparsebit.quantize(Net(), batches("x"))
    path = tmp_path / "net.onnx"
    qmodel.export_onnx(batches(form)[0], str(path))
    want = sparsebit.verify(path, qmodel, batches("x"))
    got = sparsebit.verify(path, qmodel, batches(form))
    assert str(got) == str(want)


CLI_NET = """
import torch
from test_same_batches import Net as build, batches as of


def loader():
    yield from of({form!r})
"""


@pytest.mark.parametrize("preset", ["w8a8", "w4a8-adaround"])
@pytest.mark.parametrize("form", ["x", "(x, y)", '({"x": x}, y)'])
def test_the_command_line_takes_the_path_of_quantize(form, preset, tmp_path, monkeypatch):
    """The same batches and config give the same weights and scales, learned rounding included."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CLI_NET.format(form=form))
    words = ["quantize", "net.py:build", "--data", "net.py:loader", "--preset", preset, "--no-export"]
    steps = ["W.QUANTIZER.ADAROUND.STEPS", 5]
    config = sparsebit.QuantConfig.load(preset)
    if preset == "w4a8-adaround":
        words += ["--set", "W.QUANTIZER.ADAROUND.STEPS=5"]
        config = config.override(*steps)
    assert main([*words, "-o", "run"]) == 0
    want = sparsebit.quantize(Net(), batches(form), config)
    want.save(tmp_path / "python")
    names = [path.name for path in (tmp_path / "python").glob("*.safetensors")]
    assert names
    for name in names:
        same_state(load_file(tmp_path / "run" / name), load_file(tmp_path / "python" / name))
