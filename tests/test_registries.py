"""Every registry is listed, and every plug-in behind it keeps its promise. What is registered enters by itself."""

from __future__ import annotations

import importlib
import json
import pkgutil

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.cli import main
from sparsebit.cli.app import commands
from sparsebit.errors import ConfigError, ExportError
from sparsebit.llm.formats import FORMATS, spec_of
from sparsebit.llm.methods import METHODS, Method
from sparsebit.llm.readers import READERS
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.solvers.rtn import rtn
from sparsebit.numeric.solvers.smoothquant import PeakStatistics
from sparsebit.numeric.solvers.wanda import PrunedWeight
from sparsebit.registries import REGISTRIES, registry
from sparsebit.registry import Registry
from sparsebit.report import FORMATS as REPORTS
from sparsebit.report.facts import Facts, Layer

OPTIONAL = (
    "triton",
    "_worker",
    "__main__",
)  # modules that need another package, or run when they are imported


# -- the table -----------------------------------------------------------------------------------------------
def test_the_table_has_every_registry():
    listed = [found for found in map(registry, REGISTRIES) if isinstance(found, Registry)]
    missing = []
    for info in pkgutil.walk_packages(sparsebit.__path__, "sparsebit."):
        if any(word in info.name for word in OPTIONAL):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, Registry) and not any(value is other for other in listed):
                missing.append(f"{info.name}.{name}")
    assert not missing, f"sparsebit/registries.py lacks {missing}"


@pytest.mark.parametrize("kind", REGISTRIES)
def test_list_shows_every_plugin(kind, capsys):
    assert main(["list", kind, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    found = registry(kind)
    named_by_text = all(isinstance(key, str) for key in found)
    expected = len(found)
    if not named_by_text:
        expected = len(set(found.values()))
    assert len(rows) == expected > 0
    assert all(row["name"] and row["help"] for row in rows), rows


# -- llm methods ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_solves_a_layer(name):
    method = METHODS[name]
    torch.manual_seed(0)
    weight = torch.randn(16, 64)
    x = torch.randn(200, 64)
    seen = PeakStatistics(x.T @ x, None, len(x), peak=x.abs().amax(0)) if method.uses_data else None
    spec = spec_of(method.bits, method.group_size, True)
    solved = method.run(weight, seen, spec, torch.float16, {})
    assert isinstance(solved, PrunedWeight if method.prunes else QuantizedWeight)
    back = solved.dequantize(torch.float32)
    assert back.shape == weight.shape and bool(back.isfinite().all())
    assert float((back - weight).square().sum() / weight.square().sum()) < 0.6
    assert method.format in FORMATS or method.prunes


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_refuses_options_that_it_does_not_have(name):
    METHODS[name].check(name, METHODS[name].options())
    with pytest.raises(ConfigError, match="nonsense"):
        METHODS[name].check(name, ["nonsense"])


def test_a_plain_function_becomes_a_method():
    def solver(weight, statistics, spec, *, keep=1.0):
        return rtn(weight * keep, None, spec)

    METHODS.register("plain_function")(solver)
    try:
        found = METHODS["plain_function"]
        assert isinstance(found, Method) and found.options() == {"keep": 1.0}
        assert found.uses_data and not found.needs_data and found.__module__ == __name__
    finally:
        del METHODS["plain_function"]


# -- llm formats and readers ---------------------------------------------------------------------------------
def solved_weights(plain: bool):
    """What methods give: zeros for plain formats; else 4 bits in groups, and 8 bits in rows."""
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    if plain:
        return [(spec_of(8, -1, True), PrunedWeight(weight * (weight.abs() > 0.5)))]
    specs = [spec_of(4, 32, True), spec_of(8, -1, True)]
    return [(spec, rtn(weight, None, spec, clip="minmax")) for spec in specs]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_reads_what_it_writes(name):
    layout = FORMATS[name]()
    taken = 0
    for spec, solved in solved_weights(layout.plain):
        try:
            tensors = layout.encode(solved)
        except ExportError as reason:
            assert str(reason), name
            continue
        taken += 1
        assert set(tensors) <= set(layout.suffixes)
        told = layout.shapes(spec, 32, 64)
        for suffix, tensor in tensors.items():
            assert tuple(tensor.shape) == told[suffix][0], suffix
        back = layout.decode(tensors, spec)
        torch.testing.assert_close(back.dequantize(torch.float32), solved.dequantize(torch.float32))
        if not layout.plain:
            assert isinstance(layout.layer(back, None, torch.float32), nn.Module)
    assert taken


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_reader_reads_formats_that_exist(name):
    reader = READERS[name]()
    assert reader.formats and all(layout in FORMATS for layout in reader.formats)
    assert isinstance(reader.version(), str)


# -- report formats ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(REPORTS))
def test_a_report_names_every_layer(name):
    facts = Facts("net.py:build", "quantize", "1", [("Parameters", "1 GB", "")])
    facts.layers = [
        Layer("conv_1", "conv.1", "Conv2d", "quantized", ""),
        Layer("fc", "fc", "Linear", "float", ""),
    ]
    text = REPORTS[name](facts)
    assert text.strip() and "conv" in text and "fc" in text and "net.py:build" in text


# -- commands ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(commands()))
def test_a_command_has_help_and_an_example_of_itself(name, capsys):
    command = commands()[name]
    assert command.example.startswith(f"sparsebit {name}") and command.function.__doc__
    assert main([*name.split(), "--help"]) == 0
    assert "Example: sparsebit" in " ".join(capsys.readouterr().out.split())
