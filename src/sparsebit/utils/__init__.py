"""Legacy: small helpers that scripts of the original project import."""

from __future__ import annotations

from sparsebit.utils.common import check_torch_version
from sparsebit.utils.yaml_utils import update_config

__all__ = ["check_torch_version", "update_config"]
