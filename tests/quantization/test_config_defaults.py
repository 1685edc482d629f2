"""What a config gets where the user says nothing: the preset below a mapping, the observer that LSQ starts from."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from torch import nn

import sparsebit
from models import small_net
from sparsebit import QuantConfig
from sparsebit.errors import ConfigError


# -- a mapping -------------------------------------------------------------------------------------------
def test_a_mapping_without_backend_dropped_the_default_preset() -> None:
    taken = QuantConfig.load({"A": {"OBSERVER": {"TYPE": "mse"}}})
    assert taken == QuantConfig.load("w8a8").override("A.OBSERVER.TYPE", "mse")
    assert taken.taken == "preset w8a8 with A.OBSERVER.TYPE: mse"


def test_a_mapping_without_backend_took_the_share_of_integer_macs_to_zero() -> None:
    net, x = small_net(), torch.randn(2, 3, 8, 8)
    plain = sparsebit.preflight(net, x)
    changed = sparsebit.preflight(net, x, {"A": {"OBSERVER": {"TYPE": "mse"}}})
    assert changed.totals["integer_macs"] == plain.totals["integer_macs"] > 0
    assert "preset w8a8 with A.OBSERVER.TYPE: mse" in str(changed)
    assert "preset" not in str(plain)


def test_a_mapping_with_backend_and_a_file_are_the_whole_config(tmp_path) -> None:
    full = QuantConfig.load({"backend": "onnxruntime", "A": {"QUANTIZER": {"BIT": 4}}})
    assert full == QuantConfig().override("BACKEND", "onnxruntime", "A.QUANTIZER.BIT", 4)
    (tmp_path / "c.yaml").write_text("A: {QUANTIZER: {BIT: 4}}\n")
    assert QuantConfig.load(tmp_path / "c.yaml") == QuantConfig().override("A.QUANTIZER.BIT", 4)
    assert full.taken == QuantConfig.load(tmp_path / "c.yaml").taken == ""


def test_what_a_mapping_is_put_on_is_logged(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="sparsebit"):
        QuantConfig.load({"W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"DISABLE": True}}})
    assert "preset w8a8 with W.QUANTIZER.BIT: 4, A.QUANTIZER.DISABLE: True" in caplog.text


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"W": {"QUANTIZER": {"BITS": 4}}}, r"W\.QUANTIZER\.BITS: unknown option; did you mean BIT\?"),
        ({"W": {}, "w": {}}, "W: given twice"),
        ({"A": {"QUANTIZER": {"BIT": 16}}}, r"A\.QUANTIZER\.BIT: onnxruntime .* BACKEND: virtual"),
        ({"A": 8}, "A: expected a section"),
    ],
)
def test_a_wrong_mapping_on_a_preset_is_named_as_it_was_written(mapping, message) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantConfig.load(mapping)


# -- learned scales --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["lsq", "LSQ", "lsq+", "lsq_plus"])
def test_lsq_started_from_min_and_max_where_nobody_named_an_observer(tmp_path, kind) -> None:
    (tmp_path / "c.yaml").write_text(f"BACKEND: virtual\nW: {{QUANTIZER: {{TYPE: {kind}, BIT: 3}}}}\n")
    from_file = QuantConfig.load(tmp_path / "c.yaml")
    mapping = {"W": {"QUANTIZER": {"TYPE": kind}}, "A": {"quantizer": {"type": kind}}}
    on_preset = QuantConfig.load(mapping)
    changed = QuantConfig.load("w8a8").override("A.QUANTIZER.TYPE", kind)
    layer = QuantConfig.load({"W": {"SPECIFIC": [{"head": ["QUANTIZER.TYPE", kind]}]}})
    assert from_file.W.OBSERVER.TYPE == on_preset.W.OBSERVER.TYPE == on_preset.A.OBSERVER.TYPE == "mse"
    assert changed.A.OBSERVER.TYPE == "mse"
    assert from_file.A.OBSERVER.TYPE == changed.W.OBSERVER.TYPE == layer.W.OBSERVER.TYPE == "minmax"
    from sparsebit.quantization.quant_config import resolve

    assert resolve(layer.w, ["head"]).OBSERVER.TYPE == "mse"


def test_the_observer_that_a_user_names_stays_with_lsq() -> None:
    named = {"QUANTIZER": {"TYPE": "lsq"}, "OBSERVER": {"TYPE": "minmax"}}
    assert QuantConfig.load({"W": named}).W.OBSERVER.TYPE == "minmax"
    pairs = ["W.OBSERVER.TYPE", "percentile", "W.QUANTIZER.TYPE", "lsq"]
    assert QuantConfig().override(*pairs).W.OBSERVER.TYPE == "percentile"  # in any order
    assert QuantConfig().override(*pairs[2:], *pairs[:2]).W.OBSERVER.TYPE == "percentile"
    lsq = QuantConfig.load({"W": named})
    assert lsq.override("W.QUANTIZER.BIT", 4).W.OBSERVER.TYPE == "minmax"
    assert QuantConfig.load(lsq.to_dict()) == QuantConfig.load(lsq) == lsq


def test_options_of_an_observer_without_its_type_do_not_name_it() -> None:
    half = {"QUANTIZER": {"TYPE": "lsq"}, "OBSERVER": {"LAYOUT": "NLC"}}
    cfg = QuantConfig.load({"A": half})
    assert (cfg.A.OBSERVER.TYPE, cfg.A.OBSERVER.LAYOUT) == ("mse", "NLC")


# -- presets for training ---------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("trace", ["fx", "export"])
def test_presets_for_training_keep_the_ends_at_8_bits(bits, trace) -> None:
    x = torch.randn(2, 3, 8, 8)
    qmodel = sparsebit.QuantModel(small_net(), f"w{bits}a{bits}-qat", example=x, trace=trace)
    found = {q.name: q.bit for _, q in qmodel.named_quantizers()}
    ends = {
        name: bit for name, bit in found.items() if "layer1" not in name and "add" not in name and bit == 8
    }
    assert len(ends) >= 5, found  # inputs and weights of both ends, and the input of the pool
    assert {bit for name, bit in found.items() if name not in ends} == {bits}
    assert all(q.TYPE == "lsq" and q.observer.TYPE == "mse" for _, q in qmodel.named_quantizers())


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.boxes, self.classes = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.body(torch.relu(self.stem(x))))
        return self.boxes(y), self.classes(y)


class Branching(nn.Module):
    """Control flow on values: torch.fx leaves it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x))
        return self.c(y if y.sum() > 0 else -y)


@pytest.mark.parametrize(
    ("net", "eights"),
    [
        (TwoHeads(), {"stem", "boxes", "classes"}),  # every head is last
        (nn.Sequential(nn.Linear(4, 4)), {"_0"}),  # first and last at once
        (Branching(), {"a", "c"}),
    ],
)
def test_first_and_last_are_places_not_names(net, eights) -> None:
    ends = [{"<first>": ["QUANTIZER.BIT", 8]}, {"<last>": ["QUANTIZER.BIT", 8]}]
    config = {"BACKEND": "virtual", "W": {"QUANTIZER": {"BIT": 4}, "SPECIFIC": ends}}
    qmodel = sparsebit.QuantModel(net.eval(), config)
    weights = {q.name.split(".")[0]: q.bit for _, q in qmodel.named_quantizers() if q.observer.is_weight}
    assert {name for name, bit in weights.items() if bit == 8} == eights
    assert {bit for name, bit in weights.items() if name not in eights} <= {4}


# -- doors -----------------------------------------------------------------------------------------------
class Unfit(nn.Module):
    """Control flow on a value, which torch.fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)) + torch.ones_like(x) * torch.tensor(float(x.shape[1])))


def test_quantize_and_preflight_had_no_trace_argument() -> None:
    x = torch.randn(4, 8)
    by_export = sparsebit.quantize(Unfit(), [x], trace="export", progress=False)
    assert by_export(x).shape == (4, 4)
    assert by_export._options["trace"] == "export"
    assert sparsebit.preflight(Unfit(), x, trace="export").totals["quantized"] >= 2
    with pytest.raises(ConfigError, match="trace: 'dynamo' is not one of"):
        sparsebit.quantize(Unfit(), [x], trace="dynamo")
    for door in (sparsebit.quantize, sparsebit.preflight):
        assert inspect.signature(door).parameters["trace"].kind is inspect.Parameter.KEYWORD_ONLY


def test_dir_of_the_package_lacked_its_main_classes() -> None:
    assert set(sparsebit.__all__) <= set(dir(sparsebit))
    assert {"QuantModel", "QuantConfig", "SparseModel", "quantize"} <= set(dir(sparsebit))
