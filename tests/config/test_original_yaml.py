"""YAML files as users of the original have them (SPARSEBIT.md 1.3 and the shapes of part 4)."""

from __future__ import annotations

import pytest
import torch
import yaml

from models import images, small_net
from sparsebit.errors import ConfigError, UnknownOptionError
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.quant_config import resolve
from sparsebit.sparse import parse_sconfig

EVERY_KEY = """
DEVICE: cpu
BACKEND: virtual
SKIP_TRACE_MODULES: ["blocks.*.drop_path"]
SCHEDULE: {FUSE_BN: True, BN_TUNING: False, DISABLE_UNNECESSARY_QUANT: True}
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER: {TYPE: uniform, BIT: 8, DISABLE: False}
  OBSERVER: {TYPE: MINMAX, PERCENTILE: {ALPHA: 0.001}, ACIQ: {DISTRIBUTION: GAUS}}
  SPECIFIC: [{"img_backbone_conv1": ["QUANTIZER.BIT", 8], "head_task_heads_*_1": ["QUANTIZER.BIT", 4]}]
A:
  QSCHEME: per-tensor-affine
  QUANTIZER: {TYPE: uniform, BIT: 8, DISABLE: False, PACT: {ALPHA_VALUE: 10}}
  OBSERVER:
    TYPE: MINMAX
    LAYOUT: NCHW
    PERCENTILE: {ALPHA: 0.001}
    ACIQ: {DISTRIBUTION: GAUS}
    MOVING_AVERAGE: {EMA_RATIO: 0.9}
  QADD: {ENABLE_QUANT: True}
  SPECIFIC: [{"*layer_norm": ["QUANTIZER.DISABLE", True], "softmax*": ["QUANTIZER.DISABLE", True],
              "lm_head": ["OBSERVER.TYPE", "ACIQ", "OBSERVER.ACIQ.DISTRIBUTION", "laplace"]}]
"""


@pytest.fixture
def parse(tmp_path):
    def parsed(text: str, read=parse_qconfig):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return read(str(path))

    return parsed


def keys_in_lower_case(tree):
    if isinstance(tree, dict):
        return {str(key).lower(): keys_in_lower_case(value) for key, value in tree.items()}
    return tree


@pytest.mark.parametrize("lower", [False, True])
def test_every_key(parse, lower) -> None:
    tree = yaml.safe_load(EVERY_KEY)
    config = parse(yaml.safe_dump(keys_in_lower_case(tree) if lower else tree))
    assert config == parse(EVERY_KEY)
    assert config.SCHEDULE.FUSE_BN is config["SCHEDULE"]["FUSE_BN"] is True
    assert config.A.QUANTIZER.PACT.ALPHA_VALUE == 10
    assert config.A.OBSERVER.MOVING_AVERAGE.EMA_RATIO == 0.9
    assert [resolve(config.w, [name]).quantizer.bit for name in ("head_task_heads_0_1", "fc")] == [4, 8]
    assert resolve(config.a, ["softmax_3"]).quantizer.disable
    assert resolve(config.a, ["lm_head"]).observer.params().distribution == "laplace"


def test_numbers_and_booleans_in_quotes(parse) -> None:
    """yacs reads the text of a value as Python: "True" is True, "8" is 8."""
    config = parse("""
SCHEDULE: {FUSE_BN: "True", MY_TASK: "False"}
W:
  QUANTIZER: {BIT: "4", DISABLE: "False"}
  GROUP: "64"
  SPECIFIC: [{"fc": ["QUANTIZER.BIT", "8", "QUANTIZER.DISABLE", "True"]}]
A:
  QUANTIZER: {PACT: {ALPHA_VALUE: "6"}}
  OBSERVER: {PERCENTILE: {ALPHA: "1e-2"}}
  QADD: {ENABLE_QUANT: "True"}
""")
    assert (config.SCHEDULE.FUSE_BN, config.SCHEDULE.MY_TASK) == (True, False)
    assert (config.W.QUANTIZER.BIT, config.W.QUANTIZER.DISABLE, config.W.GROUP) == (4, False, 64)
    assert (config.A.QUANTIZER.PACT.ALPHA_VALUE, config.A.OBSERVER.PERCENTILE.ALPHA) == (6.0, 0.01)
    assert config.A.QADD.ENABLE_QUANT is True
    layer = resolve(config.w, ["fc"])
    assert (layer.quantizer.bit, layer.quantizer.disable) == (8, True)
    sparse = parse('SPARSER: {TYPE: unstructed, STRATEGY: l1norm, RATIO: "0.5"}', parse_sconfig)
    assert sparse.SPARSER.RATIO == 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('SCHEDULE: {FUSE_BN: "yes"}', "SCHEDULE.FUSE_BN: expected true or false, got 'yes'"),
        ('SCHEDULE: {MY_TASK: "1"}', "SCHEDULE.MY_TASK: expected true or false, got 1"),
        ('W: {QUANTIZER: {BIT: "8.0"}}', "W.QUANTIZER.BIT: expected an integer, got 8.0"),
        ('W: {QUANTIZER: {BIT: "eight"}}', "W.QUANTIZER.BIT: expected an integer, got 'eight'"),
    ],
)
def test_values_that_yacs_refuses_too(parse, text, expected) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert str(error.value) == expected


def test_merge_from_file_reads_quotes_too(parse, tmp_path) -> None:
    config = parse("BACKEND: virtual").clone()
    config.defrost()
    (tmp_path / "more.yaml").write_text('W: {QUANTIZER: {BIT: "3"}}\n')
    config.merge_from_file(str(tmp_path / "more.yaml"))
    assert config.W.QUANTIZER.BIT == 3


def test_cuda_may_be_written_on_any_machine(parse) -> None:
    config = parse("DEVICE: cuda\nSCHEDULE: {FUSE_BN: True}")
    assert config.DEVICE == "cuda"
    qmodel = QuantModel(small_net(), config)  # where the model is decides, until the script moves it
    qmodel.calibrate(images())
    assert qmodel.device == torch.device("cpu")
    assert parse("DEVICE: cuda:0\nSPARSER: {RATIO: 0.5}", parse_sconfig).DEVICE == "cuda:0"


def test_unknown_keys(parse) -> None:
    for text, path in (("W: {LAYOUT: NCHW}", "W.LAYOUT"), ("EPOCHS: 3", "EPOCHS")):
        with pytest.raises(KeyError) as error:
            parse(text)
        assert isinstance(error.value, UnknownOptionError)
        assert str(error.value).startswith(f"{path}: unknown option; options are ")
