"""Legacy: helpers around YAML configs, under the names of the original."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from sparsebit.config import Config

C = TypeVar("C", bound=Config)


def update_config(config: Config, key: str, value: Any) -> None:
    """Set one option in place, even if the config is frozen: `update_config(cfg, "W.QUANTIZER.BIT", 4)`."""
    config._apply(key, value)


def _parse_config(cfg_file: str | os.PathLike[str], default_cfg: C) -> C:
    """A frozen copy of `default_cfg` with the options of the file on top."""
    cfg = default_cfg.clone()
    cfg.defrost()
    cfg.merge_from_file(cfg_file)
    cfg.freeze()
    return cfg
