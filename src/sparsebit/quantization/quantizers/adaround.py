"""AdaRound: learned rounding of weights (Nagel et al., Up or Down?, ICML 2020). Its work comes with reconstruction."""

from __future__ import annotations

from typing import Any

from sparsebit.errors import ConfigError, NotReadyError
from sparsebit.quantization.common import QuantTarget
from sparsebit.quantization.quantizers import register_quantizer
from sparsebit.quantization.quantizers.base import Quantizer as BaseQuantizer

_LATER = "adaround needs layer reconstruction, which comes with a later release; use uniform with OBSERVER.TYPE: mse"


@register_quantizer
class AdaRoundQuantizer(BaseQuantizer):
    TYPE = "adaround"

    @classmethod
    def check(cls, cfg: Any) -> None:
        if QuantTarget.WEIGHT not in cfg.target:
            raise ConfigError("QUANTIZER.TYPE: adaround is for weights only")

    def __init__(self, config: Any):
        raise NotReadyError(_LATER)


class LinearTempDecay:
    """The schedule of AdaRound's temperature."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotReadyError(_LATER)


def reconstruct_qlayer(*args: Any, **kwargs: Any) -> None:
    raise NotReadyError(_LATER)


Quantizer = AdaRoundQuantizer
