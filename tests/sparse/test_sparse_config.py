"""SparseConfig: both orders and all spellings of TYPE and STRATEGY."""

from __future__ import annotations

import pytest
import torch

from sparsebit.errors import ConfigError
from sparsebit.sparse import parse_sconfig
from sparsebit.sparse.sparse_config import _C, SparseConfig


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("structed", "structured"),
        ("Structured", "structured"),
        ("unstructed", "unstructured"),
        ("UNSTRUCTURED", "unstructured"),
    ],
)
@pytest.mark.parametrize("keys", [("TYPE", "STRATEGY"), ("STRATEGY", "TYPE")])
@pytest.mark.parametrize("strategy", ["l1norm", "L1Norm"])
def test_D28_both_orders_and_spellings(tmp_path, keys, kind, expected, strategy) -> None:
    path = tmp_path / "sconfig.yaml"
    path.write_text(f"SPARSER: {{{keys[0]}: {kind}, {keys[1]}: {strategy}, RATIO: 0.5}}\n")
    cfg = parse_sconfig(path)
    assert (expected, "l1norm", 0.5) == (cfg.SPARSER.TYPE, cfg.SPARSER.STRATEGY, cfg.SPARSER.RATIO)
    assert SparseConfig.load(cfg.to_dict()) == cfg
    assert f"  TYPE: {expected}\n  STRATEGY: l1norm\n  RATIO: 0.5\n" in str(cfg)  # `print(sconfig)`


@pytest.mark.parametrize(
    "sparser",
    [{"TYPE": "l1norm"}, {"STRATEGY": "unstructed"}, {"STRATEGY": "l1norm"}, {"TYPE": "unstructed"}],
)
def test_one_key_alone_in_either_place(sparser) -> None:
    cfg = parse_sconfig({"SPARSER": sparser})
    assert cfg.sparser.strategy == "l1norm"
    assert cfg.sparser.type == ("unstructured" if "unstructed" in sparser.values() else "structured")


def test_D38_ratio_may_be_an_integer() -> None:
    ratio = parse_sconfig({"SPARSER": {"RATIO": 1}}).SPARSER.RATIO
    assert ratio == 1.0
    assert isinstance(ratio, float)


@pytest.mark.parametrize(
    ("sparser", "expected"),
    [
        ({"RATIO": 1.5}, "SPARSER.RATIO: must be less than or equal to 1, got 1.5"),
        ({"RATIO": "half"}, "SPARSER.RATIO: expected a number, got 'half'"),
        (
            {"TYPE": "structered"},
            "SPARSER.TYPE: 'structered' is not one of structured, unstructured; did you mean",
        ),
        (
            {"STRATEGY": "l3norm"},
            "SPARSER.STRATEGY: 'l3norm' is not a registered sparser; did you mean",
        ),
        (
            {"TYPE": "l1nrm", "STRATEGY": "structured"},
            "SPARSER.STRATEGY: 'l1nrm' is not a registered sparser; did you mean l1norm?",
        ),
        ({"RATIOS": 0.5}, "SPARSER.RATIOS: unknown option; did you mean RATIO?"),
    ],
)
def test_errors(sparser, expected) -> None:
    with pytest.raises(ConfigError) as error:
        parse_sconfig({"SPARSER": sparser})
    assert str(error.value).startswith(expected)


def test_default_config_has_the_yacs_verbs() -> None:
    cfg = _C.clone()
    cfg.defrost()
    cfg.DEVICE = torch.device("cpu")
    cfg.merge_from_list(["SPARSER.TYPE", "unstructed", "SPARSER.RATIO", 0.25])
    cfg.freeze()
    assert (cfg.DEVICE, cfg.SPARSER.TYPE, cfg.SPARSER.RATIO) == ("cpu", "unstructured", 0.25)
    assert _C.SPARSER.RATIO == 0.0
