"""QuantConfig: keys, defaults, the forms of YAML that users have, presets, round trips."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebit.errors import ConfigError
from sparsebit.quantization.common import Backend, Granularity, QuantTarget, get_backend, get_qscheme
from sparsebit.quantization.observers import OBSERVERS_MAP
from sparsebit.quantization.presets import preset_path, presets
from sparsebit.quantization.quant_config import _C, QuantConfig, parse_qconfig, resolve
from sparsebit.quantization.quant_config import _C as default_config


def message(data: Any) -> str:
    with pytest.raises(ConfigError) as error:
        QuantConfig.load(data)
    return str(error.value)


# -- keys and defaults -----------------------------------------------------------------------------------
def test_defaults() -> None:
    assert _C.to_dict() == {
        "DEVICE": "cuda" if torch.cuda.is_available() else "cpu",
        "BACKEND": "virtual",
        "SKIP_TRACE_MODULES": [],
        "SCHEDULE": {
            "FUSE_BN": False,
            "BN_TUNING": False,
            "DISABLE_UNNECESSARY_QUANT": True,
            "EQUALIZE": False,
            "BIAS_CORRECTION": False,
        },
        "W": {
            "QSCHEME": "per-channel-symmetric",
            "QUANTIZER": {"TYPE": "uniform", "BIT": 8, "DISABLE": False},
            "OBSERVER": {"TYPE": "minmax"},
            "SPECIFIC": [],
            "GROUP": None,
            "PAIR_RULE": True,
        },
        "A": {
            "QSCHEME": "per-tensor-affine",
            "QUANTIZER": {"TYPE": "uniform", "BIT": 8, "DISABLE": False},
            "OBSERVER": {"TYPE": "minmax", "LAYOUT": "NCHW"},
            "SPECIFIC": [],
            "QADD": {"ENABLE_QUANT": False},
            "PER_CALL": False,
            "RNN_STATE": False,
        },
    }
    assert _C == QuantConfig() == QuantConfig.load({"BACKEND": "virtual"})
    assert _C is default_config
    assert _C.is_frozen()


def test_plugin_defaults_of_the_original() -> None:
    assert _C.A.QUANTIZER.PACT.ALPHA_VALUE == 10
    assert _C.W.OBSERVER.PERCENTILE.ALPHA == _C.A.OBSERVER.PERCENTILE.ALPHA == 0.001
    assert _C.A.OBSERVER.ACIQ.DISTRIBUTION == "gaus"
    assert _C.A.OBSERVER.MOVING_AVERAGE.EMA_RATIO == 0.9


def test_targets() -> None:
    assert _C.w.target == _C.W.TARGET == (QuantTarget.WEIGHT,)
    assert _C.a.target == _C.A.TARGET == (QuantTarget.FEATURE,)


FORM = """
BACKEND: {backend}
W: {{QSCHEME: per-channel-symmetric, QUANTIZER: {{TYPE: {w}, BIT: 8}}, OBSERVER: {{TYPE: MINMAX}}}}
A:
  QSCHEME: {scheme}
  QUANTIZER: {{TYPE: {a}, BIT: 8}}
  OBSERVER: {{TYPE: {observer}, LAYOUT: {layout}}}
"""


def form(tmp_path, scheme: str, **values: str) -> QuantConfig:
    defaults = {"backend": "virtual", "w": "lsq", "a": "uniform", "observer": "MINMAX", "layout": "NCHW"}
    return read(tmp_path, FORM.format(**{**defaults, "scheme": scheme, **values}))


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime", "tensorrt", "TensorRT", "OpenVINO"])
@pytest.mark.parametrize("w", ["uniform", "lsq", "dorefa", "adaround"])
def test_yaml_of_weights(tmp_path, backend, w) -> None:
    cfg = form(tmp_path, "per-tensor-symmetric", backend=backend, w=w)
    assert (backend.lower(), w) == (cfg.BACKEND, cfg.W.QUANTIZER.TYPE)


@pytest.mark.parametrize("a", ["uniform", "lsq", "lsq+", "pact", "dorefa"])
@pytest.mark.parametrize(
    "observer", ["MINMAX", "MSE", "PERCENTILE", "KL_HISTOGRAM", "ACIQ", "MOVING_AVERAGE"]
)
@pytest.mark.parametrize("layout", ["NCHW", "NLC"])
def test_yaml_of_activations(tmp_path, a, observer, layout) -> None:
    cfg = form(tmp_path, "per-tensor-affine", a=a, observer=observer, layout=layout)
    assert (a, observer.lower(), layout) == (cfg.A.QUANTIZER.TYPE, cfg.A.OBSERVER.TYPE, cfg.A.OBSERVER.LAYOUT)


FULL = """
BACKEND: virtual
SKIP_TRACE_MODULES: ["blocks.*.drop_path"]
SCHEDULE: {FUSE_BN: True, BN_TUNING: False, DISABLE_UNNECESSARY_QUANT: True, MY_FUSION: False}
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER: {TYPE: uniform, BIT: 8, DISABLE: False}
  OBSERVER: {TYPE: MINMAX}
  SPECIFIC: [{"img_backbone_conv1": ["QUANTIZER.BIT", 8], "head_task_heads_*_1": ["QUANTIZER.BIT", 8]}]
A:
  QSCHEME: per-tensor-affine
  QUANTIZER: {TYPE: uniform, BIT: 8}
  OBSERVER: {TYPE: PERCENTILE, PERCENTILE: {ALPHA: 1e-4}}
  QADD: {ENABLE_QUANT: True}
  SPECIFIC: [{"*layer_norm": ["QUANTIZER.DISABLE", True], "softmax*": ["QUANTIZER.DISABLE", True],
              "lm_head": ["OBSERVER.TYPE", "ACIQ", "OBSERVER.ACIQ.DISTRIBUTION", "laplace"]}]
"""


def read(tmp_path, text: str) -> QuantConfig:
    path = tmp_path / "qconfig.yaml"
    path.write_text(text)
    return parse_qconfig(str(path))


@pytest.mark.parametrize("spell", [str, str.lower])
def test_full_yaml_in_both_letter_cases(tmp_path, spell) -> None:
    cfg = read(tmp_path, spell(FULL))
    same = read(tmp_path, FULL)
    assert cfg.override("A.SPECIFIC", []) == same.override("A.SPECIFIC", [])  # values there stay as written
    assert resolve(cfg.a, ["lm_head"]) == resolve(same.a, ["lm_head"])
    assert resolve(cfg.a, ["lm_head"]).observer.type == "aciq"
    assert cfg.SKIP_TRACE_MODULES == ["blocks.*.drop_path"]
    assert cfg.SCHEDULE.FUSE_BN is cfg.schedule.fuse_bn is True
    assert cfg.SCHEDULE.MY_FUSION is cfg.schedule.my_fusion is False
    assert [cfg.schedule.enabled(task) for task in ("MY_FUSION", "fuse_bn", "not_mentioned")] == [
        False,
        True,
        True,
    ]
    assert cfg.A.OBSERVER.PERCENTILE.ALPHA == cfg.a.observer.params().alpha == 1e-4
    assert cfg.A.QADD.ENABLE_QUANT is True
    assert cfg.A.SPECIFIC[0]["softmax*"] == ["QUANTIZER.DISABLE", True]
    assert cfg.a.observer.params("aciq").distribution == "gaus"


def test_every_source_gives_the_same_config(tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("BACKEND: virtual\nW: {QUANTIZER: {BIT: 4}}\n")
    mapping = {"backend": "virtual", "w": {"quantizer": {"bit": 4}}}
    sources = [tmp_path / "c.yaml", str(tmp_path / "c.yaml"), mapping]
    configs = [QuantConfig.load(source) for source in sources]
    assert configs[0] == configs[1] == configs[2]
    again = QuantConfig.load(configs[0])
    assert again == configs[0]
    assert again is not configs[0]
    assert again.is_frozen()


def test_load_checks_a_config_that_was_edited() -> None:
    cfg = _C.clone()
    cfg.defrost()
    cfg.BACKEND = "tensorrt"  # not possible with affine activations, but still being edited
    with pytest.raises(ConfigError, match=r"^A\.QSCHEME: tensorrt"):
        QuantConfig.load(cfg)


def test_the_verbs_of_scripts_for_the_original() -> None:
    qconfig = default_config.clone()
    qconfig.defrost()
    qconfig.DEVICE = "cuda:0"
    qconfig.W.QUANTIZER.BIT = 4
    qconfig.A.OBSERVER.PERCENTILE.ALPHA = 0
    qconfig.merge_from_list(["W.QSCHEME", "per-tensor-symmetric", "A.QUANTIZER.TYPE", "pact"])
    qconfig.freeze()
    assert (qconfig.DEVICE, qconfig.W.QUANTIZER.BIT, qconfig.W.QSCHEME) == (
        "cuda:0",
        4,
        "per-tensor-symmetric",
    )
    assert qconfig.SCHEDULE.BN_TUNING is False
    assert "DEVICE: cuda:0" in str(qconfig)
    assert default_config == QuantConfig()


# -- presets ---------------------------------------------------------------------------------------------
def test_every_preset_loads_and_says_what_it_is_for() -> None:
    assert {"w8a8", "w8a8-tensorrt", "w4a8", "w4a4", "w8", "w4"} <= presets().keys()
    assert {"w4a4-qat", "w3a3-qat", "w2a2-qat"} <= presets().keys()
    for name, purpose in presets().items():
        cfg = QuantConfig.load(name)
        assert cfg.w.quantizer.bit == int(name[1])
        assert cfg.a.quantizer.disable == ("a" not in name)
        assert cfg.a.quantizer.disable or cfg.a.quantizer.bit == int(name[3])
        assert cfg.backend == ("tensorrt" if "tensorrt" in name else "onnxruntime")
        assert cfg.schedule.fuse_bn == ("qat" not in name)  # batch norms train along
        assert 20 < len(purpose) < 110
        assert parse_qconfig(str(preset_path(name))) == cfg


def test_default_preset_and_unknown_preset() -> None:
    assert QuantConfig.load(None) == QuantConfig.load("w8a8")
    assert message("w8a9").startswith(
        "w8a9: no such file or preset; did you mean w8a8? (presets: w2a2-qat, w3a3-qat, w4, w4a4, w4a4-qat, w4a8, "
    )
    assert message("no/such.yaml").startswith("no/such.yaml: no such file or preset")


# -- copies, text, enums ---------------------------------------------------------------------------------
def names(registry: Any) -> Any:
    return st.sampled_from(sorted(registry)).flatmap(lambda n: st.sampled_from([n, n.upper(), n.title()]))


@st.composite
def tensors(draw: Any, activation: bool) -> dict[str, Any]:
    schemes = ["per-tensor-symmetric", "PER_TENSOR_AFFINE", "per-channel-symmetric", "per_channel_affine"]
    keys = st.sampled_from(["QUANTIZER.BIT", "quantizer.bit"])
    rules = st.dictionaries(st.text(min_size=1), st.tuples(keys, st.integers(1, 16)).map(list), max_size=2)
    observer = {"TYPE": draw(names(OBSERVERS_MAP)), "PERCENTILE": {"ALPHA": draw(st.floats(0, 0.5))}}
    if activation:
        observer["LAYOUT"] = draw(st.sampled_from(["nchw", "NLC"]))
    return {
        "QSCHEME": draw(st.sampled_from(schemes)),
        "QUANTIZER": {
            "TYPE": draw(st.sampled_from(["uniform", "LSQ", "DoReFa"])),
            "BIT": draw(st.integers(1, 16)),
            "DISABLE": draw(st.booleans()),
            "PACT": {"ALPHA_VALUE": draw(st.integers(1, 9) | st.floats(0.5, 1e6))},
        },
        "OBSERVER": observer,
        "SPECIFIC": draw(st.lists(rules, max_size=2)),
        **({"QADD": {"ENABLE_QUANT": draw(st.booleans())}} if activation else {}),
    }


@st.composite
def configs(draw: Any) -> dict[str, Any]:
    tasks = st.sampled_from(["FUSE_BN", "BN_TUNING", "DISABLE_UNNECESSARY_QUANT", "my_task", "OTHER"])
    schedule = draw(st.dictionaries(tasks, st.booleans()))
    w = draw(tensors(activation=False))
    if schedule.get("BN_TUNING"):
        w["QSCHEME"] = "per-channel-affine"
    return {
        "DEVICE": draw(st.sampled_from(["cpu", "cuda", "cuda:1"])),
        "BACKEND": "virtual",
        "SKIP_TRACE_MODULES": draw(st.lists(st.text(), max_size=3)),
        "SCHEDULE": schedule,
        "W": w,
        "A": draw(tensors(activation=True)),
    }


@settings(max_examples=60, deadline=None)
@given(configs())
def test_any_valid_config_survives_text_pickle_and_copies(tmp_path_factory, data) -> None:
    cfg = QuantConfig.load(data)
    path = tmp_path_factory.mktemp("round") / "c.yaml"
    path.write_text(cfg.dump(), encoding="utf-8")
    assert QuantConfig.load(path) == cfg
    assert QuantConfig.load(cfg.to_dict()) == cfg
    assert pickle.loads(pickle.dumps(cfg)) == copy.deepcopy(cfg) == cfg.clone() == cfg


def test_common_names() -> None:
    assert [(b.name, b.value) for b in Backend] == [
        ("VIRTUAL", 0),
        ("ONNXRUNTIME", 1),
        ("TENSORRT", 2),
        ("OPENVINO", 3),
    ]
    assert [(g.name, g.value) for g in Granularity] == [("LAYERWISE", 0), ("CHANNELWISE", 1)]
    assert [(t.name, t.value) for t in QuantTarget] == [("WEIGHT", 0), ("FEATURE", 1)]
    assert get_backend("TensorRT") is Backend.TENSORRT
    assert get_qscheme("per-tensor-affine") is torch.per_tensor_affine
    assert get_qscheme("PER_CHANNEL_SYMMETRIC") is torch.per_channel_symmetric
    with pytest.raises(ConfigError, match=r"BACKEND: 'tensort' is not one of .*; did you mean tensorrt\?"):
        get_backend("tensort")
    with pytest.raises(ConfigError, match=r"QSCHEME: 'per-tensor' is not one of"):
        get_qscheme("per-tensor")


def test_importing_the_config_loads_no_torch() -> None:
    code = "import sys, sparsebit.quantization.quant_config, sparsebit.sparse; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
