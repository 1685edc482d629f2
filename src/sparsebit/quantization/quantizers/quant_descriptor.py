"""QuantDescriptor: what one tensor is quantized to. Mutable, because users change bits of single layers."""

from __future__ import annotations

from typing import Any

import torch

from sparsebit.numeric.spec import QuantSpec
from sparsebit.quantization.common import QuantTarget, get_qscheme

CHANNEL_AXIS = {"NCHW": 1, "NLC": 2}
SCHEMES = {  # (per channel, symmetric)
    (True, True): torch.per_channel_symmetric,
    (True, False): torch.per_channel_affine,
    (False, True): torch.per_tensor_symmetric,
    (False, False): torch.per_tensor_affine,
}


class QuantDescriptor:
    def __init__(self, cfg: Any):
        self.target: QuantTarget = cfg.target[0]
        weight = self.target is QuantTarget.WEIGHT
        if weight:
            self._ch_axis = 0
        else:
            self._ch_axis = CHANNEL_AXIS[cfg.observer.layout]
        self.bs_axis = None if weight else 0
        self.is_perchannel, self.is_symmetric = next(
            flags for flags, scheme in SCHEMES.items() if scheme is get_qscheme(cfg.qscheme)
        )
        self.group: int | None = None  # values per scale, where a channel has several
        self.set_bit(cfg.quantizer.bit)

    def set_bit(self, bit: int) -> None:
        QuantSpec(bits=bit)  # refuses what no grid can have
        self.bit = bit

    def set_symmetric(self, is_symmetric: bool) -> None:
        self.is_symmetric = is_symmetric

    def set_group(self, group: int | None) -> None:
        self.group = group

    def set_ch_axis(self, axis: int) -> None:
        self._ch_axis = axis

    @property
    def spec(self) -> QuantSpec:
        """The present grid; ask again after `set_bit` or `set_symmetric`."""
        if not self.is_perchannel:
            return QuantSpec(self.bit, self.is_symmetric)
        return QuantSpec(self.bit, self.is_symmetric, self._ch_axis, group=self.group)

    @property
    def scheme(self) -> torch.qscheme:
        return SCHEMES[self.is_perchannel, self.is_symmetric]

    @property
    def ch_axis(self) -> int:
        return self._ch_axis

    @property
    def qmin(self) -> int:
        return self.spec.qmin

    @property
    def qmax(self) -> int:
        return self.spec.qmax

    @property
    def qrange(self) -> tuple[int, int]:
        return self.qmin, self.qmax

    @property
    def _type(self) -> str:
        """The codes: "int8" if symmetric, "uint8" if affine."""
        return f"{'int' if self.is_symmetric else 'uint'}{self.bit}"

    def calc_qmin_qmax(self, bit: int, scheme: torch.qscheme | str) -> tuple[int, int]:
        """The lowest and the highest code of another width and scheme; this descriptor stays the same."""
        if isinstance(scheme, str):
            asked = get_qscheme(scheme)
        else:
            asked = scheme
        symmetric = next(flags[1] for flags, known in SCHEMES.items() if known is asked)
        spec = QuantSpec(bit, symmetric)
        return spec.qmin, spec.qmax

    def __repr__(self) -> str:
        if self.group is None:
            groups = ""
        else:
            groups = f" in groups of {self.group}"
        return f"{self._type} {str(self.scheme).removeprefix('torch.').replace('_', '-')}{groups}"
