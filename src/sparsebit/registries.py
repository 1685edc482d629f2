"""Every extension point by its name, and the place of its registry. `sparsebit list` and the contract tests read it.

The modules are named, not imported: this file loads nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

REGISTRIES = {
    "observers": "sparsebit.quantization.observers:OBSERVERS_MAP",
    "quantizers": "sparsebit.quantization.quantizers:QUANTIZERS_MAP",
    "ops": "sparsebit.quantization.modules:QMODULE_MAP",
    "backends": "sparsebit.export.backends:BACKENDS",
    "presets": "sparsebit.quantization.presets:presets",
    "sparsers": "sparsebit.sparse.sparsers:SPARSERS_MAP",
    "sparse-ops": "sparsebit.sparse.modules:SMODULE_MAP",
    "channel-rules": "sparsebit.sparse.labels.rules:CHANNEL_RULES",
    "llm-methods": "sparsebit.llm.methods:METHODS",
    "llm-formats": "sparsebit.llm.formats:FORMATS",
    "llm-readers": "sparsebit.llm.readers:READERS",
    "report-formats": "sparsebit.report:FORMATS",
    "commands": "sparsebit.cli.app:commands",
}


def registry(kind: str) -> Mapping[Any, Any]:
    """The registry of an extension point; for presets, which are files, a dict from names to first lines."""
    module, name = REGISTRIES[kind].split(":")
    found = getattr(importlib.import_module(module), name)
    if callable(found):
        found = found()
    mapping: Mapping[Any, Any] = found
    return mapping
