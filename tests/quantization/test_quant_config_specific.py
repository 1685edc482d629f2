"""SPECIFIC: every dict counts, names and paths match, later ones win, typos show when the file is read."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sparsebit.errors import ConfigError
from sparsebit.quantization.quant_config import QuantConfig, resolve, unmatched
from sparsebit.utils import update_config

NAMES = ("layer1_0_conv1", "layer1.0.conv1")  # fx name and module path of one layer


def weights(specific: Any, **more: Any) -> Any:
    return QuantConfig.load({"W": {"SPECIFIC": specific, **more}}).w


def message(data: Any) -> str:
    with pytest.raises(ConfigError) as error:
        QuantConfig.load(data)
    return str(error.value)


# -- matching --------------------------------------------------------------------------------------------
def test_D11_every_dict_of_the_list_counts_and_later_ones_win() -> None:
    w = weights(
        [{"layer1*": ["QUANTIZER.BIT", 4], "*": ["OBSERVER.TYPE", "mse"]}, {"*conv1": ["QUANTIZER.BIT", 6]}]
    )
    layer = resolve(w, NAMES)
    assert (layer.quantizer.bit, layer.observer.type) == (6, "mse")
    assert resolve(w, ("layer1_0_bn", "layer1.0.bn")).quantizer.bit == 4
    assert resolve(w, ("fc", "fc")).quantizer.bit == 8


@pytest.mark.parametrize("pattern", ["layer1_0_conv1", "layer1.0.conv1", "layer1.?.conv*", "*_conv[12]"])
def test_D11_patterns_match_fx_names_and_module_paths(pattern) -> None:
    assert resolve(weights([{pattern: ["QUANTIZER.BIT", 4]}]), NAMES).quantizer.bit == 4


@pytest.mark.parametrize("pattern", ["LAYER1*", "conv1", "layer1.0", "0.0"])
def test_patterns_match_whole_names_and_mind_the_case(pattern) -> None:
    assert resolve(weights([{pattern: ["QUANTIZER.BIT", 4]}]), NAMES).quantizer.bit == 8


def test_D11_patterns_that_match_nothing_are_told() -> None:
    w = weights(
        [{"layer1*": ["QUANTIZER.BIT", 4], "layr*": ["QUANTIZER.BIT", 4]}, {"0.0": ["QUANTIZER.BIT", 4]}]
    )
    assert unmatched(w, NAMES) == ["layr*", "0.0"]
    assert unmatched(w, iter([*NAMES, "0.0", "layr"])) == []
    assert unmatched(weights([]), NAMES) == []


# -- forms -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "specific",
    [
        [{"fc": ["QUANTIZER.BIT", 4, "QUANTIZER.TYPE", "LSQ"]}],
        [{"fc": ["quantizer.bit", 4, "Quantizer.Type", "LSQ"]}],
        {"fc": ["QUANTIZER.BIT", 4, "QUANTIZER.TYPE", "LSQ"]},
        ({"fc": ("QUANTIZER.BIT", 4, "QUANTIZER.TYPE", "LSQ")},),
        {"fc": {"QUANTIZER": {"BIT": 4, "TYPE": "LSQ"}}},
        [{"fc": {"quantizer.bit": 4, "QUANTIZER": {"type": "LSQ"}}}],
    ],
)
def test_all_forms_mean_the_same(specific) -> None:
    w = weights(specific)
    assert w.SPECIFIC == [{"fc": ["QUANTIZER.BIT", 4, "QUANTIZER.TYPE", "LSQ"]}]
    layer = resolve(w, ["fc"])
    assert (layer.quantizer.bit, layer.quantizer.type, layer.specific) == (4, "lsq", [])
    assert layer.is_frozen()


def test_empty_and_number_like() -> None:
    assert weights(None).specific == weights([]).specific == []
    assert (
        resolve(weights({0: ["QUANTIZER.BIT", 4]}), ["_0", "0"]).quantizer.bit == 4
    )  # YAML reads 0 as a number


def test_options_of_plugins_and_of_activations() -> None:
    rules = {
        "lm_head": [
            "OBSERVER.TYPE",
            "ACIQ",
            "OBSERVER.ACIQ.DISTRIBUTION",
            "laplace",
            "OBSERVER.LAYOUT",
            "NLC",
        ]
    }
    a = QuantConfig.load({"A": {"SPECIFIC": [rules]}}).a
    layer = resolve(a, ("lm_head", "lm_head"))
    assert (layer.observer.type, layer.observer.layout) == ("aciq", "NLC")
    assert layer.observer.params().distribution == "laplace"
    assert layer.target == a.target
    assert type(layer) is type(a)


# -- errors ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("specific", "expected"),
    [
        (
            [{}, {"*head": ["QUANTIZER.BITS", 4]}],
            "W.SPECIFIC[1]['*head']: QUANTIZER.BITS: unknown option; did you mean BIT?",
        ),
        ([{"*": ["QUANTIZER.BIT", "4"]}], "W.SPECIFIC[0]['*']: QUANTIZER.BIT: expected an integer, got '4'"),
        (
            {"*": ["QSCHEME", "per-tensor"]},
            "W.SPECIFIC[0]['*']: QSCHEME: 'per-tensor' is not one of per-tensor-symmetric, ",
        ),
        ({"*": {"QADD": {"ENABLE_QUANT": True}}}, "W.SPECIFIC[0]['*']: QADD: unknown option; options are"),
        (
            {"a": ["QUANTIZER.BIT"]},
            "W.SPECIFIC[0]['a']: expected [KEY, value, KEY, value, ...], got ['QUANTIZER.BIT']",
        ),
        ({"a": 4}, "W.SPECIFIC[0]['a']: expected [KEY, value, KEY, value, ...], got 4"),
        (
            {"a": [4, "QUANTIZER.BIT"]},
            "W.SPECIFIC[0]['a']: expected a key such as QUANTIZER.BIT before each value",
        ),
        ({"a": ["SPECIFIC", []]}, "W.SPECIFIC[0]['a']: SPECIFIC cannot be nested"),
        (["fc"], "W.SPECIFIC: expected a list of {pattern: [KEY, value, ...]}, got ['fc']"),
        (3, "W.SPECIFIC: expected a list of {pattern: [KEY, value, ...]}, got 3"),
    ],
)
def test_errors_when_the_file_is_read(specific, expected) -> None:
    assert message({"W": {"SPECIFIC": specific}}).startswith(expected)


def test_limits_of_a_backend_hold_for_overrides_too() -> None:
    trt = {"BACKEND": "tensorrt", "A": {"QSCHEME": "per-tensor-symmetric"}}
    assert message({**trt, "W": {"SPECIFIC": {"fc": ["QUANTIZER.BIT", 5]}}}).startswith(
        "W.SPECIFIC[0]['fc']: QUANTIZER.BIT: tensorrt runs weights of 4 or 8 bits, not 5"
    )
    assert message({**trt, "W": {"SPECIFIC": {"fc": ["QSCHEME", "per-tensor-affine"]}}}).startswith(
        "W.SPECIFIC[0]['fc']: QSCHEME: tensorrt has no zero points for weights"
    )
    QuantConfig.load({**trt, "W": {"SPECIFIC": {"fc": ["QUANTIZER.BIT", 5, "QUANTIZER.DISABLE", True]}}})
    bad = {
        "BACKEND": "tensorrt",
        "W": {"SPECIFIC": {"fc": ["OBSERVER.TYPE", "mse"]}},
        "A": {"SPECIFIC": {"x": []}},
    }
    assert len(message(bad).splitlines()) == 1  # the default is to blame, not each pattern


def test_overrides_may_be_legal_only_together() -> None:
    # pact wants a per-tensor scheme, which another pattern provides
    a = QuantConfig.load(
        {
            "A": {
                "QSCHEME": "per-channel-affine",
                "SPECIFIC": [{"fc*": ["QUANTIZER.TYPE", "pact"]}, {"*1": ["QSCHEME", "per-tensor-affine"]}],
            }
        }
    ).a
    assert resolve(a, ["fc1"]).quantizer.type == "pact"
    with pytest.raises(
        ConfigError, match=r"^A\.SPECIFIC, layer 'fc2': QSCHEME: pact needs a per-tensor scheme"
    ):
        resolve(a, ["fc2"])


# -- sharing and speed -----------------------------------------------------------------------------------
def test_layers_with_the_same_overrides_share_one_config() -> None:
    w = weights([{"a*": ["QUANTIZER.BIT", 4], "*x": ["QUANTIZER.BIT", 2]}])
    assert resolve(w, ["a1"]) is resolve(w, ["a2"])
    assert resolve(w, ["b"]) is resolve(w, ["c"])
    assert [resolve(w, [name]).quantizer.bit for name in ("a1", "ax", "bx", "b")] == [4, 2, 2, 8]


def test_changes_are_seen() -> None:
    cfg = QuantConfig()
    assert resolve(cfg.w, ["fc"]).quantizer.bit == 8
    update_config(cfg, "W.QUANTIZER.BIT", 7)  # in place, although frozen
    assert resolve(cfg.w, ["fc"]).quantizer.bit == 7
    cfg.defrost()
    cfg.W.QUANTIZER.BIT = 6
    assert resolve(cfg.w, ["fc"]).quantizer.bit == 6
    cfg.W.SPECIFIC = [{"fc": ["QUANTIZER.BIT", 3]}]
    cfg.freeze()
    assert resolve(cfg.w, ["fc"]).quantizer.bit == 3
    with pytest.raises(ConfigError, match=r"SPECIFIC\[0\]\['fc'\]: QUANTIZER.BITS: unknown option"):
        cfg.defrost() or setattr(cfg.W, "SPECIFIC", [{"fc": ["QUANTIZER.BITS", 3]}])


def test_resolving_2000_layers_is_fast() -> None:
    w = weights([{f"blocks.{i}.*": ["QUANTIZER.BIT", 4] for i in range(10)}])
    layers = [(f"layer{i}_conv", f"layer{i}.conv") for i in range(2000)]

    def seconds() -> float:
        start = time.process_time()
        for names in layers:
            resolve(w, names)
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) / len(layers) < 40e-6  # 7 us on a quiet machine
