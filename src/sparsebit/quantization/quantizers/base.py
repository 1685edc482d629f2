"""Quantizer: an observer, a grid (scale and zero point), and one mode.

A new quantizer is a subclass with a TYPE and `_forward(x, scale, zero_point)`; registering it is enough. The grid is
kept with one entry per channel, (channels,); `_forward` gets it in a shape that broadcasts over `x`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from sparsebit.config import Config
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.numeric import (
    QParams,
    QuantSpec,
    broadcast,
    fake_quantize,
    in_groups,
    minmax_from_qparams,
)
from sparsebit.numeric.pair_sums import exact_scale, keep_pairs, needs_rule
from sparsebit.quantization.common import Backend
from sparsebit.quantization.observers import build_observer
from sparsebit.quantization.quantizers.quant_descriptor import QuantDescriptor

UNUSED = -1.0  # the scale of a quantizer that saw no data


class Mode(Enum):
    FLOAT = "float"  # pass values through
    OBSERVE = "observe"  # pass values through and let the observer see them
    QUANT = "quant"  # round to the grid
    EXPORT = "export"  # emit a named mark for the exporter


class Reuse:
    """Permission to write into a value that has no other reader, while `running` holds (see reuse_memory.py).

    `makers` are the modules that wrote the value, `reader` the one that may write into it.
    """

    def __init__(self, running: set[str], makers: list[nn.Module], reader: nn.Module):
        self.running = running
        self.makers = makers
        self.reader = reader

    def allows(self, x: Any) -> bool:
        if not self.running or not isinstance(x, Tensor) or x.requires_grad or torch.compiler.is_compiling():
            return False
        watched = _global_forward_hooks or _global_forward_pre_hooks or self.reader._forward_pre_hooks
        return not watched and not any(m._forward_hooks for m in self.makers)


class Quantizer(nn.Module):
    TYPE: ClassVar[str] = ""
    START: ClassVar[str] = (
        ""  # the observer of a config that names this quantizer and no observer; "": minmax
    )
    scale: Tensor  # (1,) or (channels,); 0 means: not calibrated yet
    zero_point: Tensor
    # Each of these two is True for a class that defines the method, unless the class sets it to False.
    keeps_batches: ClassVar[bool] = False  # calc_qparams() finds all batches in self.observer.data_cache
    broadcasts: ClassVar[bool] = (
        False  # _forward() gets scales that broadcast over x, in place of (channels,)
    )

    class Params(Config):
        """Options of a quantizer, read from QUANTIZER.<TYPE> of the config."""

    def __init__(self, config: Any):
        super().__init__()
        self.cfg = config
        self.name = ""  # "<fx name>.weight_quantizer", given by the model that holds it
        self.qdesc = QuantDescriptor(config)
        self.register_buffer("scale", torch.zeros(1))
        self.register_buffer("zero_point", torch.zeros(1))
        self.observer = build_observer(config, self.qdesc)
        self._broadcasts = _applies(type(self), "broadcasts", "_forward")
        self.observer.keeps_batches |= _applies(type(self), "keeps_batches", "calc_qparams")
        self.dims: int | None = None  # of the values that it quantizes, once that is known
        self.mode = Mode.FLOAT
        # True: never quantizes (fused into its neighbour, or disabled)
        self.absorbed: bool = config.quantizer.disable
        self.backend = Backend.VIRTUAL
        self.pair_rule = (
            False  # a weight whose neighbouring codes add up to at most 128, see numeric/pair_sums.py
        )
        self.reuse: Reuse | None = None
        # these, itself included, read one value and get one grid (one_grid.py)
        self.tied: list[Quantizer] = []
        self.known_range: tuple[float, float] | None = None  # whatever calibration sees (known_ranges.py)
        self.on_regrid: Callable[[], None] | None = None  # called when set_bit() changes a calibrated grid
        self.on_export: Callable[[Quantizer, Tensor], Tensor] | None = None  # replaces rounding
        self.unused = False  # calibration showed it no float data: pass values through until the next one

    # -- what a subclass defines ---------------------------------------------------------------------
    def _forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Values of `x` on the grid. The default is plain fake quantization.

        In your class `scale` and `zero_point` broadcast over `x`. Where W.GROUP is set, each row of `x` is one group.
        """
        inplace = self.reuse is not None and self.reuse.allows(x)
        grid = QParams(_flat(scale), _flat(zero_point))
        return fake_quantize(x, grid, self.spec, inplace, self.grad_scale(x))

    def grad_scale(self, x: Tensor) -> float:
        """The factor for the gradients of a learned scale and zero point."""
        return 1.0

    def transform(self, x: Tensor) -> Tensor:
        """Change a value before it is rounded; the exported file contains this step."""
        return x

    def current_qparams(self) -> QParams:
        """The present grid, as plain values."""
        scale, zero_point = self._qparams_preprocess(torch.zeros(1, device=self.scale.device))
        scale = scale.detach().reshape(-1).clone()
        return QParams(scale, zero_point.detach().reshape(-1).expand_as(scale).round())

    def _qparams_preprocess(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point for this call; quantizers that learn them clean them up here."""
        return self.scale, self.zero_point

    # -- running -------------------------------------------------------------------------------------
    def forward(self, x: Any) -> Any:
        if self.absorbed or self.unused or self.mode is Mode.FLOAT:
            return x
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x  # sizes, indices, masks: never quantized
        if self.mode is Mode.OBSERVE:
            self.update_observer(x)
            return x
        if self.mode is Mode.EXPORT and self.on_export is not None:
            return self.on_export(self, x)
        return self.rounded(x)

    def rounded(self, x: Tensor) -> Tensor:
        """`x` on the grid, in any mode."""
        scale, zero_point = self._qparams_preprocess(x)
        y = self._on_grid(x, scale, zero_point)
        if self.keeps_pairs:
            return keep_pairs(y, scale, self.spec)
        return y

    def _on_grid(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        if not self._broadcasts:  # a view of the scales takes as long as rounding a small weight
            return self._forward(x, scale, zero_point)
        spec = self.spec
        rows = in_groups(x, spec.group)
        y = self._forward(rows, _over(rows, scale, spec.axis), _over(rows, zero_point, spec.axis))
        return y.reshape(x.shape).to(x.dtype)  # a float32 scale makes float32 of half precision

    @property
    def keeps_pairs(self) -> bool:
        """Is the pair rule in force? 7 bits and less keep it by themselves."""
        return self.pair_rule and needs_rule(self.spec)

    @torch.no_grad()
    def fit_pairs(self, weight: Tensor) -> None:
        """Under the pair rule a larger scale may be better: take the one with the least error."""
        if self.keeps_pairs and self.calibrated and not self.absorbed:
            grid = self.current_qparams()
            self._set_qparams(exact_scale(self.transform(weight), grid, self.spec), grid.zero_point)

    # -- calibration ---------------------------------------------------------------------------------
    def reset(self) -> None:
        """Forget the observed values; a subclass that keeps other sums forgets them here."""
        self.observer.reset()
        self.unused = False

    def update_observer(self, x: Tensor) -> None:
        self.dims = x.dim()
        try:
            self.observer.update(x)
        except CalibrationError as error:
            raise CalibrationError(f"{self.name or type(self).__name__}: {error}") from None

    def calc_qparams(self) -> tuple[Tensor, Tensor]:
        """Set the grid from what the observer has seen."""
        if self.absorbed:
            return self.scale, self.zero_point
        try:
            found = self.observer.calc_qparams()
            if self.known_range is not None:
                low, high = (torch.tensor([bound], device=self.device) for bound in self.known_range)
                found = self.observer.calc_qparams_with_minmax(low, high)
            return self._set_qparams(*found)
        except CalibrationError as error:
            raise CalibrationError(f"{self.name or type(self).__name__}: {error}") from None

    def calc_qparams_with_minmax(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        if self.absorbed:
            return self.scale, self.zero_point
        return self._set_qparams(*self.observer.calc_qparams_with_minmax(min_val, max_val))

    def _set_qparams(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the values in place of the old ones, which may be buffers or learnable parameters."""
        for name, value in (("scale", scale), ("zero_point", zero_point)):
            with torch.inference_mode(False):  # so that a later forward may need its gradient
                value = value.detach().to(self.scale.device).reshape(-1).clone()
            old = getattr(self, name)
            if isinstance(old, nn.Parameter):
                value = nn.Parameter(value, requires_grad=old.requires_grad)
            setattr(self, name, value)
        return self.scale, self.zero_point

    def share_grid(self, others: list[Quantizer]) -> None:
        """All of these get the grid over the range of all; where scales are learned, they learn the same ones."""
        low = torch.stack([q.observer.min_val.reshape(-1).to(self.device) for q in others]).amin(0)
        high = torch.stack([q.observer.max_val.reshape(-1).to(self.device) for q in others]).amax(0)
        if self.known_range is not None:
            low, high = (torch.full_like(x, bound) for x, bound in zip((low, high), self.known_range))
        self.calc_qparams_with_minmax(low, high)
        for other in others:
            other.observer.min_val = low.clone()
            other.observer.max_val = high.clone()
            other.scale = self.scale
            other.zero_point = self.zero_point

    def set_unused(self) -> None:
        """No float data came by: stay out of the way. A negative scale carries that through a state_dict."""
        self.unused = True
        self._set_qparams(torch.full((1,), UNUSED), torch.zeros(1))

    @property
    def calibrated(self) -> bool:
        return bool((self.scale != 0).all())

    # -- switches ------------------------------------------------------------------------------------
    def enable_quant(self) -> None:
        if not self.absorbed and not self.calibrated:
            raise CalibrationError(
                f"{self.name or type(self).__name__} has no scale yet. Calibrate first: prepare_calibration(), "
                f"run a few batches, calc_qparams(); or load a calibrated state_dict"
            )
        self.mode = Mode.QUANT

    def disable_quant(self) -> None:
        self.mode = Mode.FLOAT

    def enable_export_onnx(self) -> None:
        self.mode = Mode.EXPORT

    def disable_export_onnx(self) -> None:
        self.mode = Mode.QUANT

    def set_fake_fused(self) -> None:
        """Never quantize here: the op is computed together with its neighbour. Cannot be undone."""
        self.absorbed = True
        for p in self.parameters(recurse=False):
            p.requires_grad_(False)

    def set_backend(self, backend: Backend) -> None:
        self.backend = self.observer.backend = backend

    def set_bit(self, bit: int) -> None:
        """Change the width; a calibrated quantizer keeps its value range and gets a new grid."""
        old = self.spec
        self.qdesc.set_bit(bit)
        if self.calibrated and not self.unused and old.bits != bit:
            self._regrid(old)
            if self.on_regrid is not None:
                self.on_regrid()

    def _regrid(self, old: QuantSpec) -> None:
        """A new grid over the old range, after the width changed."""
        if torch.isfinite(self.observer.min_val).all():
            self.calc_qparams_with_minmax(self.observer.min_val, self.observer.max_val)

    def set_ch_axis(self, axis: int) -> None:
        """Which axis holds the channels (the output channels of a transposed convolution are axis 1)."""
        self.qdesc.set_ch_axis(axis)

    @property
    def params(self) -> Any:
        """The options of this plug-in, as the config gives them."""
        return self.cfg.quantizer.params(self.TYPE)

    # -- views ---------------------------------------------------------------------------------------
    def _broadcast_qparams(self, params: Tensor) -> Tensor:
        """One value per channel, (channels,), in a shape that broadcasts over what this quantizer rounds."""
        name = self.name or type(self).__name__
        group = self.spec.group
        if group is not None:
            raise ConfigError(
                f"{name}: with W.GROUP no shape of the scales broadcasts over the weight; use "
                f"weight.reshape(-1, {group}) and scale[:, None]"
            )
        if self.dims is None:
            raise CalibrationError(
                f"{name} has seen no value yet, so its number of dimensions is not known; calibrate first, or set "
                f"quantizer.dims"
            )
        return broadcast(params.reshape(-1), self.dims, self.ch_axis if params.numel() > 1 else 0)

    @property
    def device(self) -> torch.device:
        return self.scale.device

    @property
    def spec(self) -> QuantSpec:
        return self.qdesc.spec

    @property
    def bit(self) -> int:
        return self.qdesc.bit

    @property
    def ch_axis(self) -> int:
        return self.qdesc.ch_axis

    @property
    def is_perchannel(self) -> bool:
        return self.qdesc.is_perchannel

    @property
    def is_symmetric(self) -> bool:
        return self.qdesc.is_symmetric

    @property
    def is_enable(self) -> bool:
        return self.use_quant and not self.absorbed

    @property
    def use_quant(self) -> bool:
        return self.mode in (Mode.QUANT, Mode.EXPORT)

    @property
    def export_onnx(self) -> bool:
        return self.mode is Mode.EXPORT

    @property
    def fake_fused(self) -> bool:
        return self.absorbed

    def __repr__(self) -> str:
        """One line: the kind of quantizer, and the range of its codes."""
        if self.absorbed:
            return f"{self.TYPE}, {'disabled' if self.cfg.quantizer.disable else 'absorbed'}"
        text = f"{self.TYPE}, {self.qdesc}, observer={self.observer.TYPE.lower()}"
        if self.unused:
            return f"{text}, saw no float data"
        # a traced scale has no values; transformers prints modules while it runs
        if self.mode is Mode.EXPORT:
            return text
        if not self.calibrated:
            return f"{text}, not calibrated"
        lo, hi = minmax_from_qparams(QParams(self.scale.detach(), self.zero_point.detach()), self.spec)
        return f"{text}, range=[{lo.min():.4g}, {hi.max():.4g}], {'on' if self.use_quant else 'off'}"

    # -- checkpoints ---------------------------------------------------------------------------------
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the grid as (channels,), whatever shape a class of the user gave it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if keep_vars else ("scale", "zero_point"):
            destination[prefix + name] = _flat(destination[prefix + name])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take scale and zero point in whatever shape they were saved: (1,), (C,), or the old (C, 1, 1, 1)."""
        for name in ("scale", "zero_point"):
            saved = state_dict.get(prefix + name)
            mine = getattr(self, name)
            if saved is None:
                continue
            self.dims = saved.dim() if saved.dim() > 1 else self.dims
            saved = state_dict[prefix + name] = saved.reshape(-1)
            if saved.shape != mine.shape:
                mine.data = torch.empty_like(saved, device=mine.device)
            # folded: equalize per tensor, batch norms per channel
            if name == "scale" and bool((saved != 0).any()):
                self.qdesc.is_perchannel = len(saved) > 1
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.unused = bool((self.scale == UNUSED).all())

    def _apply(self, fn: Any, recurse: bool = True) -> Quantizer:
        """Scales follow the model to another device, but stay float32 when it becomes half precision."""
        before = {name: getattr(self, name).detach() for name in ("scale", "zero_point")}
        super()._apply(fn, recurse)
        for name, value in before.items():
            now = getattr(self, name)
            if now.dtype != value.dtype:
                now.data = value.to(now.device)
        return self


def _applies(cls: type[Quantizer], option: str, method: str) -> bool:
    """The class attribute `option`; by default True for a class that defines `method`."""
    nearest = next(c for c in cls.__mro__ if option in vars(c) or method in vars(c))
    return bool(vars(nearest).get(option, True))


def _over(x: Tensor, p: Tensor, axis: int | None) -> Tensor:
    """`p` in a shape that broadcasts over `x`; a tensor of several dimensions is returned unchanged."""
    if p.dim() == 1 and (axis is not None or not x.dim()):
        return broadcast(p, x.dim(), axis)
    if p.numel() == 1 and p.dim() > x.dim():
        return p.reshape(-1)
    return p


def _flat(p: Tensor) -> Tensor:
    return p if p.dim() == 1 else p.reshape(-1)
