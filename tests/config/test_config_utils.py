"""Helpers of sparsebit.utils, under the names and signatures of the original."""

from __future__ import annotations

import pytest
import torch
from pydantic import Field

from sparsebit.config import Config, ConfigError
from sparsebit.utils import check_torch_version, update_config
from sparsebit.utils.yaml_utils import _parse_config


class Inner(Config):
    b: int = 1


class Outer(Config):
    a: Inner = Field(default_factory=Inner)
    c: str = "x"


def test_update_config_changes_a_frozen_config_in_place() -> None:
    cfg = Outer()
    inner = cfg.a
    update_config(cfg, "A.B", 2)
    assert cfg.a.b == inner.b == 2
    assert cfg.is_frozen()
    with pytest.raises(ConfigError, match=r"A\.B: expected an integer, got 'x'"):
        update_config(cfg, "A.B", "x")


def test_check_torch_version_compares_versions_not_text(monkeypatch) -> None:
    assert check_torch_version("1.11.0")
    assert not check_torch_version("999.0")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0+cpu"))
    assert check_torch_version("2.9.1")  # as text, 2.13 comes before 2.9
    assert not check_torch_version("2.13.1")


def test_parse_config_puts_a_file_on_top_of_defaults(tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("A: {B: 5}\n")
    default = Outer(c="y")
    cfg = _parse_config(tmp_path / "c.yaml", default)
    assert cfg == Outer(a={"b": 5}, c="y")
    assert cfg.is_frozen()
    assert default.a.b == 1
