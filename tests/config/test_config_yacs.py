"""The verbs of yacs, which scripts of the original use on its configs: the same on ours."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import yaml

from models import small_net
from sparsebit.errors import ConfigError, FrozenConfigError, UnknownOptionError
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.common import QuantTarget
from sparsebit.quantization.quant_config import _C, QuantConfig, resolve, verify_bits
from sparsebit.sparse.sparse_config import _C as SPARSE_C
from sparsebit.sparse.sparse_config import SparseConfig
from sparsebit.utils.yaml_utils import update_config


@pytest.fixture(params=["default", "parsed", "sparse"])
def config(request, tmp_path):
    """Configs from every source, ready to be edited."""
    (tmp_path / "q.yaml").write_text("BACKEND: virtual\n")
    sources = {"default": _C, "parsed": parse_qconfig(str(tmp_path / "q.yaml")), "sparse": SPARSE_C}
    cfg = sources[request.param].clone()
    cfg.defrost()
    return cfg


# -- new keys --------------------------------------------------------------------------------------------
def test_a_new_key_is_kept_copied_and_dumped(config) -> None:
    config.MY_KEY = 1
    config["MY_LIST"] = ["a", (1, 2.5)]
    config.MY_KEY = 2
    config.freeze()
    assert (config.MY_KEY, config["my_key"], config.get("MY_KEY"), "MY_KEY" in config) == (2, 2, 2, True)
    dumped = yaml.safe_load(config.dump())
    assert (dumped["MY_KEY"], dumped["MY_LIST"]) == (2, ["a", [1, 2.5]])
    assert "MY_KEY: 2\n" in str(config)
    for twin in (config.clone(), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin.MY_KEY == 2
        assert twin == config
    assert config.override("DEVICE", "cpu").MY_KEY == 2
    with pytest.raises(FrozenConfigError, match="MY_KEY: this config is frozen"):
        config.MY_KEY = 3
    with pytest.raises(AttributeError):  # what yacs raises
        config.OTHER_KEY = 3


def test_new_keys_go_through_a_quant_model(tmp_path) -> None:
    config = _C.clone()
    config.defrost()
    config.MY_KEY = {"lr": 0.1}
    config.W.NOTE = "first"
    config.A.OBSERVER.WINDOW = 3
    qmodel = QuantModel(small_net(), config)
    assert (qmodel.cfg.MY_KEY, qmodel.cfg.W.NOTE, qmodel.cfg.A.OBSERVER.WINDOW) == ({"lr": 0.1}, "first", 3)
    assert resolve(qmodel.cfg.w, ["fc"]).NOTE == "first"
    qmodel.save(tmp_path)  # the file holds what the library knows, so that it can be read again
    assert QuantModel.load(tmp_path, small_net()).cfg == QuantConfig() == config.without_new_keys()


def test_values_that_yaml_does_not_know_are_dumped_as_text() -> None:
    config = _C.clone()
    config.defrost()
    config.MINE = {"target": QuantTarget.WEIGHT}
    assert yaml.safe_load(config.dump())["MINE"] == {"target": "QuantTarget.WEIGHT"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("BACKBONE", "resnet18"), ("SCHEDULER", "cosine"), ("DEVICE_ID", 0), ("LOAD", "a.pth"), ("KEYS", [1])],
)
def test_names_that_look_like_ours_may_be_new(name, value) -> None:
    config = _C.clone()
    config.defrost()
    setattr(config, name, value)
    assert getattr(config, name) == config[name] == config.clone()[name] == value


def test_a_name_and_a_value_like_those_of_an_option_are_a_typo() -> None:
    config = _C.clone()
    config.defrost()
    with pytest.raises(UnknownOptionError, match=r"BITS: unknown option; did you mean BIT\?"):
        config.W.QUANTIZER.BITS = 4
    with pytest.raises(UnknownOptionError, match=r"BACKENDS: unknown option; did you mean BACKEND\?"):
        config.BACKENDS = "tensorrt"
    with pytest.raises(UnknownOptionError, match=r"W\.MINE: unknown option"):
        config.W = {"MINE": 1}  # only the key that is assigned may be new
    with pytest.raises(UnknownOptionError, match="CLONE: unknown option"):
        config["clone"] = 1  # the name of a method could not be read again


def test_files_and_lists_change_new_keys_but_do_not_add_them(config, tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("MY_KEY: 5\nMODEL: {DEPTH: 18}\n")
    for merge in (
        lambda: config.merge_from_file(path),
        lambda: config.merge_from_list(["MY_KEY", 5]),
        lambda: config.merge_from_other_cfg({"MY_KEY": 5}),
    ):
        with pytest.raises(UnknownOptionError, match="MY_KEY: unknown option"):
            merge()
    config.MY_KEY = 1
    config.MODEL = {"NAME": "resnet", "DEPTH": 50}
    config.merge_from_file(path)
    assert (config.MY_KEY, config.MODEL) == (5, {"NAME": "resnet", "DEPTH": 18})
    config.merge_from_list(["MY_KEY", "6", "MODEL.DEPTH", "34"])
    assert (config.MY_KEY, config.MODEL) == (6, {"NAME": "resnet", "DEPTH": 34})
    config.MODEL = {}
    assert config.MODEL == {}


# -- merging ---------------------------------------------------------------------------------------------
def test_merge_from_other_cfg() -> None:
    config, other = _C.clone(), _C.clone()
    for cfg in (config, other):
        cfg.defrost()
    config.A.OBSERVER.PERCENTILE.ALPHA = 0.5
    weights = config.W
    other.W.QUANTIZER.BIT = 4
    other.MINE = 1
    config.merge_from_other_cfg(other)
    assert (config.W.QUANTIZER.BIT, config.A.OBSERVER.PERCENTILE.ALPHA, config.MINE) == (4, 0.5, 1)
    assert config.W is weights
    other.W.QUANTIZER.BIT = 5
    assert config.W.QUANTIZER.BIT == 4
    config.merge_from_other_cfg({"W": {"QUANTIZER": {"BIT": 3}}})
    assert config.W.QUANTIZER.BIT == 3
    config.W.merge_from_other_cfg(_C.W)
    assert config.W.QUANTIZER.BIT == 8
    config.freeze()
    with pytest.raises(FrozenConfigError, match="merge_from_other_cfg: this config is frozen"):
        config.merge_from_other_cfg(other)


def test_merge_from_other_cfg_of_a_sparse_config() -> None:
    config = SPARSE_C.clone()
    config.defrost()
    config.merge_from_other_cfg(SparseConfig.load({"SPARSER": {"RATIO": 0.25}}))
    assert config.SPARSER.RATIO == 0.25
    with pytest.raises(UnknownOptionError):
        config.merge_from_other_cfg(_C)


def test_update_config_of_a_section() -> None:
    config = _C.clone()
    update_config(config.W, "TARGET", (QuantTarget.WEIGHT,))
    assert config.W.TARGET == config.W["TARGET"] == (QuantTarget.WEIGHT,)
    with pytest.raises(ConfigError, match=r"TARGET: is always .*WEIGHT.* here"):
        update_config(config.W, "TARGET", (QuantTarget.FEATURE,))
    update_config(config, "W.MINE", 3)
    assert config.W.MINE == 3
    assert config.is_frozen()
    with pytest.raises(UnknownOptionError, match=r"A\.NOTHING: unknown option"):
        update_config(config, "A.NOTHING.MINE", 3)


# -- reading as a mapping --------------------------------------------------------------------------------
def test_configs_are_read_like_dicts(config) -> None:
    config.MY_KEY = 1
    keys = list(config)
    assert keys == config.keys() == [key for key, _ in config.items()]
    assert keys[0] == "DEVICE"
    assert keys[-1] == "MY_KEY"
    assert dict(config) == {key: config[key] for key in keys} == {**config}
    assert config.values() == [config[key] for key in keys]
    assert "device" in config
    assert "NOTHING" not in config
    assert 3 not in config
    assert config.get("NOTHING") is None
    assert config.get("NOTHING", 3) == 3


def test_sections_are_read_like_dicts() -> None:
    assert _C["W"]["QSCHEME"] == _C.W.QSCHEME
    assert "QUANTIZER" in _C["W"]
    assert dict(_C.A.QADD) == {"ENABLE_QUANT": False}
    assert _C["A"]["OBSERVER"]["PERCENTILE"]["ALPHA"] == 0.001
    assert "PERCENTILE" in _C.A.OBSERVER
    assert "MY_TASK" not in _C.SCHEDULE


def test_dump_takes_the_options_of_yaml() -> None:
    file = io.StringIO()
    _C.dump(stream=file, sort_keys=True)
    assert file.getvalue().startswith("A:\n")


# -- errors ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "data",
    [
        {"W": {"QUANTIZER": {"BIT": -1}}},
        {"W": {"QSCHEME": None}},
        {"BACKEND": "tensorrt"},
        {"BACKEND": "onnxruntime", "W": {"QUANTIZER": {"BIT": 16}}},
        {"SCHEDULE": {"BN_TUNING": True}, "W": {"QSCHEME": "per-tensor-symmetric"}},
        {"A": {"QUANTIZER": {"TYPE": "adaround"}}},
    ],
)
def test_what_the_original_asserted_is_an_assertion_error(data) -> None:
    with pytest.raises(AssertionError) as error:
        parse_qconfig(data)
    assert isinstance(error.value, ConfigError)


def test_verify_bits_raises_an_assertion_error() -> None:
    config = _C.clone()
    config.defrost()
    config.merge_from_list(["BACKEND", "onnxruntime", "W.QUANTIZER.BIT", 16])
    with pytest.raises(AssertionError, match=r"W\.QUANTIZER\.BIT: onnxruntime runs weights of 2 to 8 bits"):
        verify_bits(config)


def test_an_unknown_key_is_a_key_error_whose_message_has_no_quotes() -> None:
    for data in ({"NOTHING": 1}, {"W": {"NOTHING": 1}}, {"A": {"OBSERVER": {"NOTHING": 1}}}):
        with pytest.raises(KeyError) as error:
            parse_qconfig(data)
        assert str(error.value).endswith(" unknown option; options are " + str(error.value).split(" are ")[1])
        assert str(error.value)[0] in "NWA"
    with pytest.raises(KeyError) as error:
        _C["NOTHING"]
    assert str(error.value).startswith("NOTHING: unknown option; options are DEVICE, ")
    with pytest.raises(ConfigError) as error:
        parse_qconfig({"BACKEND": "cpu"})
    assert not isinstance(error.value, KeyError)
    assert isinstance(pickle.loads(pickle.dumps(error.value)), ConfigError)
