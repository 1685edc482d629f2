"""Observer: sees batches one at a time, keeps a small state, and gives the value range to quantize to.

A new observer is a subclass with a TYPE that collects something in `accumulate(x)`, x of (channels, samples),
and turns it into a range in `calc_minmax()`. The exact range of everything seen is there as `seen_range()`.
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sparsebit.config import Config
from sparsebit.errors import CalibrationError
from sparsebit.numeric.histogram import Bins, Histogram, channel_minmax, image_minmax, sample_stride
from sparsebit.numeric.qparams import qparams_from_minmax
from sparsebit.numeric.spec import QuantSpec, as_channels, in_groups
from sparsebit.quantization.common import Backend, Granularity, QuantTarget

if TYPE_CHECKING:
    from typing_extensions import Self

EXACT_WEIGHT = 2**16  # values per channel that are kept without bins: weights are in memory anyway


class DataCache:
    """Whole batches, for plug-ins that read them as the original's did."""

    def __init__(self, qdesc: Any):
        self.qdesc = qdesc
        self._data_cache: list[Tensor] = []

    def update(self, data: Tensor) -> None:
        self._data_cache.append(data)

    def reset(self) -> None:
        self._data_cache = []

    def __len__(self) -> int:
        return len(self._data_cache)

    def get_data_cache(self) -> list[Tensor]:
        if not self._data_cache:
            raise CalibrationError("no data cached; run some batches before the range is computed")
        return self._data_cache

    def get_batch_size(self) -> int | None:
        """The number of observed images; None for weights."""
        if self.qdesc.target is QuantTarget.WEIGHT:
            return None
        return sum(len(d) for d in self._data_cache)

    def get_data_for_calibration(self, granularity: Granularity) -> Tensor:
        """All values in a row, (values,); or (channels, values) if CHANNELWISE."""
        batches = self.get_data_cache()
        if granularity is Granularity.CHANNELWISE:
            return torch.cat([as_channels(d, self.qdesc.ch_axis) for d in batches], 1)
        return torch.cat([d.flatten() for d in batches])


class ObserverCache(DataCache):
    """The cache of one observer: it keeps every value, and shows it to the observer too."""

    def __init__(self, observer: Observer):
        self.qdesc = observer.qdesc
        self.observer = observer

    @property
    def _data_cache(self) -> list[Tensor]:  # type: ignore[override]
        observer = self.observer
        if observer.has_data and not observer.kept:
            raise CalibrationError(
                f"{type(observer).__name__} saw {observer.batches} batches and kept none of them; set "
                f"observer.keeps_batches = True before the first batch"
            )
        return observer.kept

    def update(self, data: Tensor) -> None:
        self.observer.update(data)
        if not self.observer.keeps_batches:
            self.observer.keep(data)

    def reset(self) -> None:
        self.observer.reset()

    def __len__(self) -> int:
        return self.observer.batches


class Observer(nn.Module):
    """Base of all observers.

    One that overrides none of `accumulate`, `observe` and `update` finds all batches in `self.data_cache`, as
    in the original; its memory grows with the number of batches.
    """

    TYPE: ClassVar[str] = ""
    min_val: Tensor  # the range last computed: () before, (1,) or (channels,) after
    max_val: Tensor
    kept: list[Tensor]  # whole batches, see data_cache

    class Params(Config):
        """Options of an observer, read from OBSERVER.<TYPE> of the config."""

    def __init__(self, config: Any, qdesc: Any):
        super().__init__()
        self.cfg = config
        self.qdesc = qdesc
        self.backend = Backend.VIRTUAL
        self.register_buffer("min_val", torch.tensor(float("-inf")))
        self.register_buffer("max_val", torch.tensor(float("inf")))
        streams = any(
            getattr(type(self), m) is not getattr(Observer, m) for m in ("accumulate", "observe", "update")
        )
        self.keeps_batches = not streams  # True: memory grows with the number of batches
        self.reset()

    # -- what a subclass defines ---------------------------------------------------------------------
    def accumulate(self, x: Tensor) -> None:
        """Take in one batch, (channels, samples); one channel if the scheme is per tensor."""

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        """The range to quantize to, two tensors of shape (channels,)."""
        raise NotImplementedError(f"{type(self).__name__} must define calc_minmax()")

    def merge(self, other: Self) -> None:
        """Add the batches of `other`, as if this observer had seen them. Subclasses add their own state."""
        if type(other) is not type(self):
            raise CalibrationError(f"cannot merge {type(other).__name__} into {type(self).__name__}")
        if other.low is not None and other.high is not None:
            self._extend(other.low, other.high, other.batches)
        self.kept = [*self.kept, *other.kept]

    def reset(self) -> None:
        """Forget all batches; the range last computed stays."""
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self.batches = 0
        self.kept = []

    # -- seeing data ---------------------------------------------------------------------------------
    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """See one batch of any shape and type. NaN and Inf are refused; empty batches are ignored."""
        if x.numel():
            self.observe(in_groups(x.detach().float(), self.spec.group))
            if self.keeps_batches:
                self.keep(x)

    def keep(self, x: Tensor) -> None:
        """Keep a copy of one batch: an in-place ReLU may follow."""
        if x.numel():
            self.kept.append(in_groups(x.detach().to(torch.float32, copy=True), self.spec.group))

    def observe(self, x: Tensor) -> None:
        """One batch in its own layout, float32. Override where the axis of images matters."""
        self.see(*channel_minmax(x, self.spec.axis), x)
        self.accumulate(as_channels(x, self.spec.axis))

    def see(self, low: Tensor, high: Tensor, x: Tensor) -> None:
        """Widen the exact range; the two ends also tell whether all values of `x` are finite."""
        if low.is_cpu and not bool((low.isfinite() & high.isfinite()).all()):  # other devices: see seen_range
            bad = int((~x.isfinite()).sum())
            raise CalibrationError(
                f"NaN or Inf in calibration data: {bad} of {x.numel()} values, batch {self.batches + 1}; "
                f"check the inputs and the float model"
            )
        self._extend(low, high, 1)

    def _extend(self, low: Tensor, high: Tensor, batches: int) -> None:
        if self.low is not None and self.high is not None:
            if low.shape != self.low.shape:
                raise CalibrationError(
                    f"batch {self.batches + 1} has {len(low)} channels, those before had {len(self.low)}; "
                    f"use a per-tensor QSCHEME, or check ch_axis and LAYOUT"
                )
            low = low.minimum(self.low.to(low.device))
            high = high.maximum(self.high.to(high.device))
        self.low = low
        self.high = high
        self.batches += batches

    @property
    def has_data(self) -> bool:
        return self.low is not None

    @property
    def data_cache(self) -> DataCache:
        """The batches that were kept. `data_cache.update(x)` shows the observer a batch and keeps it."""
        return ObserverCache(self)

    def seen_range(self) -> tuple[Tensor, Tensor]:
        """Exact smallest and largest value of everything seen, per channel."""
        if self.low is None or self.high is None:
            raise CalibrationError("saw no data; run some batches through the model before computing ranges")
        if not bool((self.low.isfinite() & self.high.isfinite()).all()):
            raise CalibrationError(
                f"NaN or Inf in calibration data, in one of {self.batches} batches; "
                f"check the inputs and the float model"
            )
        return self.low, self.high

    # -- results -------------------------------------------------------------------------------------
    @torch.no_grad()
    def calc_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point, (channels,) or (1,); the range is kept as `min_val` and `max_val`."""
        self._set_range(*self.seen_range())  # where calc_minmax() of a user's class finds it
        self._set_range(*self.calc_minmax())
        return self.calc_qparams_with_minmax(self.min_val, self.max_val)

    def _set_range(self, low: Tensor, high: Tensor) -> None:
        home = self.min_val.device
        self.min_val, self.max_val = (t.detach().float().reshape(-1).to(home) for t in (low, high))

    def calc_qparams_with_minmax(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        qparams = qparams_from_minmax(min_val, max_val, self.spec)
        return qparams.scale, qparams.zero_point

    @cached_property
    def params(self) -> Any:
        return self.cfg.observer.params(self.TYPE)

    @property
    def spec(self) -> QuantSpec:
        spec: QuantSpec = self.qdesc.spec
        return spec

    @property
    def ch_axis(self) -> int:
        return int(self.qdesc.ch_axis)

    @property
    def is_perchannel(self) -> bool:
        return bool(self.qdesc.is_perchannel)

    @property
    def is_symmetric(self) -> bool:
        return bool(self.qdesc.is_symmetric)

    @property
    def is_weight(self) -> bool:
        return self.qdesc.target is QuantTarget.WEIGHT

    @property
    def device(self) -> torch.device:
        return self.min_val.device

    def extra_repr(self) -> str:
        return f"{self.TYPE}, batches={self.batches}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the range in whatever shape it was saved."""
        for name in ("min_val", "max_val"):
            saved = state_dict.get(prefix + name)
            mine = getattr(self, name)
            if saved is not None and saved.shape != mine.shape:
                setattr(self, name, torch.empty_like(saved, device=mine.device))
        super()._load_from_state_dict(state_dict, prefix, *args)


class CachingObserver(Observer):
    """Keeps every batch in `self.data_cache`: the explicit name for observers written for the old API."""


class HistogramObserver(Observer):
    """Base of observers that work on the distribution of values (numeric/histogram.py)."""

    histogram: Histogram | None

    def observe(self, x: Tensor) -> None:
        low, high = channel_minmax(x, self.spec.axis)
        self.see(low, high, x)
        rows = as_channels(x, self.spec.axis)
        if self.histogram is None:
            self.histogram = Histogram(len(rows), EXACT_WEIGHT if self.is_weight else None, x.device)
        stride = 1 if self.is_weight else sample_stride(*rows.shape)
        self.histogram.add(rows, low, high, stride)

    def merge(self, other: Self) -> None:
        super().merge(other)
        if self.histogram is None:
            self.histogram = copy.deepcopy(other.histogram)
        elif other.histogram is not None:
            self.histogram.merge(other.histogram)

    def reset(self) -> None:
        super().reset()
        self.histogram = None

    def bins(self, **options: Any) -> Bins:
        """The observed values, as bins."""
        low, high = self.seen_range()
        if self.histogram is None:  # not with data: update() fills both
            raise CalibrationError("saw no data")
        return self.histogram.bins(low, high, **options)


class ImageObserver(Observer):
    """Base of observers of per-image ranges: `accumulate_images` gets two (images, channels) tensors.

    A weight counts as one image.
    """

    def observe(self, x: Tensor) -> None:
        images = x[None] if self.is_weight else x
        low, high = image_minmax(images, self.image_axis)
        self.values_per_image = images.numel() // low.numel()  # of one channel
        self.see(low.amin(0), high.amax(0), x)
        self.accumulate_images(low.double(), high.double())

    @property
    def image_axis(self) -> int | None:
        axis = self.spec.axis
        if self.is_weight and axis is not None:
            return axis + 1
        return axis

    def accumulate_images(self, low: Tensor, high: Tensor) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define accumulate_images()")
