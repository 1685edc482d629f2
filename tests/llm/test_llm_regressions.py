"""Defects of the original's LLM scripts (SPARSEBIT.md, D19, D20, D43-D45): each has a test that its code would fail."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from test_walk import Strange, tiny, tokens

from sparsebit import llm
from sparsebit.llm import legacy
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.numeric.solvers.gptq import Statistics, gptq
from sparsebit.numeric.solvers.rtn import rtn
from sparsebit.numeric.spec import QuantSpec


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [None, 32])
def test_d19_packed_integers_are_clamped(bits, group):
    """Weights beyond a clipped range: the original wrote -1 and 2^b, which ran into the neighbouring fields."""
    weight = torch.randn(64, 96)
    weight[::3, ::5] *= 20  # the mse clip cuts these off
    q = rtn(weight, None, QuantSpec(bits, False, 0, group=group))
    back = legacy.decode(legacy.encode(q), bits, 96, group)
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.dequantize(), q.dequantize())
    worst = (weight / q.scales.float()[:, q.groups]).round() + q.zeros[:, q.groups]
    assert worst.max() > 2**bits - 1 or worst.min() < 0  # there were such integers


def test_d20_scales_and_zeros_are_kept(tmp_path):
    """The original derived them from the quantized weights again, whose range is smaller than the grid's."""
    weight, x = torch.randn(32, 64), torch.randn(200, 64) @ torch.randn(64, 64)
    q = gptq(weight, Statistics(x.T @ x), QuantSpec(4, False, 0), clip="minmax")
    derived = rtn(q.dequantize(), None, QuantSpec(4, False, 0), clip="minmax", scale_dtype=torch.float32)
    assert not torch.allclose(derived.scales.float(), q.scales.float(), rtol=1e-3)  # it would not be the same
    for pack8 in (False, True):
        back = legacy.decode(legacy.encode(q, None, pack8), 4, 64, None)
        torch.testing.assert_close(back.scales.float(), q.scales.float(), rtol=0, atol=0)
        assert torch.equal(back.zeros, q.zeros)


def test_d20_the_figure_is_that_of_the_saved_model(tmp_path):
    """quantize() returns no model to measure: perplexity is that of what load() reads, equal on every load."""
    model = tiny()
    report = llm.quantize(model, tokens(), save=tmp_path, bits=3, group_size=16)
    text = torch.cat(tokens())
    figures = [llm.perplexity(llm.load(report.folder, model), text) for _ in range(2)]
    assert figures[0] == figures[1]
    plain = copy.deepcopy(model)
    for name, layer in llm.load(tmp_path, model).named_modules():
        if isinstance(layer, QuantLinear):
            plain.get_submodule(name).weight.data = layer.weight
    assert llm.perplexity(plain, text) == pytest.approx(figures[0], rel=1e-4)


def test_d43_no_names_of_one_architecture(tmp_path):
    """The original looked for `feed_forward.w1`; blocks with any names, and lists of experts, work."""
    report = llm.quantize(Strange().eval(), tokens(), save=tmp_path, group_size=16)
    assert {name.split(".", 3)[3] for name in report.layers} == {"experts.0", "experts.1", "experts.2", "out"}


def test_d44_groups_work_in_layers_that_train():
    """The original's QLoRA layer: groupsize -> NotImplementedError, and no gradient for the input."""
    layer = QuantLinear(rtn(torch.randn(16, 64), None, QuantSpec(4, False, 0, group=32)))
    x = torch.randn(5, 64, requires_grad=True)
    layer(x).square().sum().backward()
    expected = 2 * (x.detach() @ layer.weight.T) @ layer.weight
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-3)


def test_d44_old_checkpoints_can_be_read(tmp_path):
    """pack32 and pack8 dicts, with groups."""
    model = tiny()
    llm.quantize(model, tokens(), save=tmp_path, group_size=16, symmetric=False)
    loaded = llm.load(tmp_path, model)
    for pack8 in (False, True):
        torch.save(legacy.to_legacy(loaded, pack8), tmp_path / "old.pt")
        old = legacy.from_legacy(torch.load(tmp_path / "old.pt"), model)
        torch.testing.assert_close(old(tokens()[0]), loaded(tokens()[0]), rtol=1e-5, atol=1e-5)


def test_d45_no_cuda_no_compiler_no_transformers_on_import():
    code = (
        "import sys, builtins\n"
        "import torch\n"
        "torch.cuda.synchronize = torch.cuda.init = lambda *a, **k: 1 / 0\n"
        "import torch.utils.cpp_extension as e; e.load = e.load_inline = lambda *a, **k: 1 / 0\n"
        "import sparsebit.llm\n"
        "print([m for m in ('transformers', 'triton', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]"), done.stdout


def test_d45_statistics_do_not_grow_with_the_tokens():
    """The original kept every input of a layer; here a layer keeps one matrix (inputs, inputs)."""
    from sparsebit.llm.walk.capture import capture
    from sparsebit.llm.walk.lane import Lane
    from sparsebit.llm.walk.statistics import collect

    model = tiny()
    for n in (1, 8):
        captured = capture(model, model.layers, tokens(n), copy.deepcopy(model.layers[0]))
        found = collect(Lane(model.layers[0], captured.calls[0], captured.hidden), [["gate", "up"]])["up"]
        assert found.hessian.shape == (32, 32) and found.tokens == n * 32


def test_d45_layers_without_bias_and_the_damping_option(tmp_path):
    assert tiny().layers[0].gate.bias is None
    a = llm.quantize(tiny(), tokens(), save=tmp_path / "a", group_size=16, damping=0.5, act_order=False)
    b = llm.quantize(tiny(), tokens(), save=tmp_path / "b", group_size=16, damping=1e-4, act_order=False)
    assert a.layers["layers.0.gate"]["error"] > b.layers["layers.0.gate"]["error"]
