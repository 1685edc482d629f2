"""Read a YAML file on top of a default config."""

from __future__ import annotations

import os
from typing import TypeVar

from sparsebit.config import Config

C = TypeVar("C", bound=Config)


def _parse_config(cfg_file: str | os.PathLike[str], default_cfg: C) -> C:
    """A frozen copy of `default_cfg` with the options of the file on top."""
    cfg = default_cfg.clone()
    cfg.defrost()
    cfg.merge_from_file(cfg_file)
    cfg.freeze()
    return cfg
