"""How much each layer loses by quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.nn import functional as F

from sparsebit.errors import NotReadyError


class QuantizationErrorProfiler:
    def __init__(self, model: fx.GraphModule):
        self.model = model

    def apply(
        self, data: Any, checker: Callable[..., Any] = F.mse_loss, is_async: bool = True
    ) -> dict[str, Any]:
        raise NotReadyError("the per-layer error profile comes with a later release")
