"""LSQ: the scale is learned (Esser et al., Learned Step Size Quantization, ICLR 2020).

Starts at 2 mean|x| / sqrt(qmax); its gradient is scaled by 1 / sqrt(values * qmax).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.numeric import QuantSpec, as_channels, in_groups
from sparsebit.quantization.quantizers import register_quantizer
from sparsebit.quantization.quantizers.base import Quantizer as BaseQuantizer

log = logging.getLogger("sparsebit")


def gs_scaling(x: Tensor, ratio: float) -> Tensor:
    """`x` itself, to the last bit, with its gradient multiplied by `ratio`."""
    scaled = x * ratio
    return x.detach() + (scaled - scaled.detach())


def lsq_grad_scale(x: Tensor, scale: Tensor, spec: QuantSpec) -> float:
    """1 / sqrt(values per scale * qmax): scales then learn as fast as weights."""
    return 1.0 / max(x.numel() / scale.numel() * spec.qmax, 1.0) ** 0.5


@register_quantizer
class LSQQuantizer(BaseQuantizer):
    TYPE = "lsq"
    signed: Tensor

    def __init__(self, config: Any):
        super().__init__(config)
        del self.scale
        self.scale = nn.Parameter(torch.zeros(1))
        self.register_buffer("signed", torch.tensor(self.is_symmetric))  # data decides for affine schemes
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._abs_sum: Tensor | None = None
        self._count = 0

    def update_observer(self, x: Tensor) -> None:
        super().update_observer(x)
        rows = as_channels(in_groups(x.detach(), self.spec.group), self.spec.axis)
        total = rows.abs().sum(1, dtype=torch.float64)
        self._abs_sum = total if self._abs_sum is None else self._abs_sum + total
        self._count += rows.shape[1]

    def calc_qparams(self) -> tuple[Tensor, Tensor]:
        if self.absorbed:
            return self.scale, self.zero_point
        if self._abs_sum is None:
            raise CalibrationError(
                f"{self.name or 'lsq'}: saw no data; run some batches before calc_qparams()"
            )
        min_val, _ = self.observer.calc_minmax()
        if not self.is_symmetric and (min_val < 0).any():
            log.warning("%s: lsq has no zero point, but the data is negative: made symmetric", self.name)
            self.qdesc.set_symmetric(True)
            self.signed.fill_(True)
        super().calc_qparams()  # keeps the range for repr and set_bit
        scale = (2 * self._abs_sum / self._count / max(self.spec.qmax, 1) ** 0.5).float()
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        return self._set_qparams(scale, torch.zeros_like(scale))

    def _regrid(self, old: QuantSpec) -> None:
        self._set_qparams(self.scale * (old.qmax / self.spec.qmax) ** 0.5, self.zero_point)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(prefix + "signed", self.signed)  # checkpoints of the original have none
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.qdesc.set_symmetric(bool(self.signed))

    def _qparams_preprocess(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale.abs(), self.zero_point

    def grad_scale(self, x: Tensor) -> float:
        return lsq_grad_scale(x, self.scale, self.spec)


Quantizer = LSQQuantizer
