"""What every observer promises: small state, exact merging, any order and layout, clear errors, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from observer_cases import ALL, HISTOGRAM, SCHEMES, batches, feed, make, range_of, rows_of, tensor_config

from sparsebit.errors import CalibrationError, ConfigError, RegistryError
from sparsebit.quantization.common import Granularity
from sparsebit.quantization.observers import (
    OBSERVERS_MAP,
    CachingObserver,
    DataCache,
    Observer,
    base,
    build_observer,
    register_observer,
)
from sparsebit.quantization.quantizers.quant_descriptor import QuantDescriptor


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(a, b, kind):
    exact = kind in HISTOGRAM or kind == "minmax"
    for x, y in zip(range_of(a), range_of(b)):
        assert torch.equal(x, y) if exact else torch.allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES[1:3])
@pytest.mark.parametrize("kind", ALL)
def test_two_halves_merged_equal_the_whole(kind, scheme):
    data = batches("outliers") + batches("normal")
    whole = feed(make(kind, scheme=scheme), data)
    for cut in (0, 2, 6):
        first, second = (
            feed(make(kind, scheme=scheme), data[:cut]),
            feed(make(kind, scheme=scheme), data[cut:]),
        )
        before = copy.deepcopy(second)
        first.merge(second)
        same(first, whole, kind)
        assert first.batches == 6
        if cut < 6:
            same(second, before, kind)  # the other one is left as it was
    if kind in HISTOGRAM:
        assert torch.equal(first.histogram.counts, whole.histogram.counts)


@pytest.mark.parametrize("scheme", SCHEMES[1:3])
@pytest.mark.parametrize("kind", [k for k in ALL if k != "moving_average"])
def test_batch_order_does_not_matter(kind, scheme):
    data = batches("outliers") + batches("normal")
    same(feed(make(kind, scheme=scheme), data), feed(make(kind, scheme=scheme), data[::-1]), kind)


def test_moving_average_depends_on_order_by_definition():
    data = batches("normal") + [10 * x for x in batches("normal")]
    up, down = (range_of(feed(make("moving_average"), d))[1] for d in (data, data[::-1]))
    assert not torch.allclose(up, down, rtol=0.05)


def state_size(observer):
    """Numbers kept between batches."""

    def count(value):
        if isinstance(value, torch.Tensor):
            return value.numel()
        if isinstance(value, (list, tuple)):
            return sum(map(count, value))
        return count(list(vars(value).values())) if type(value).__name__ == "Histogram" else 0

    return count([v for k, v in vars(observer).items() if not k.startswith("_")])


@pytest.mark.parametrize("scheme", SCHEMES[1:3])
@pytest.mark.parametrize("kind", ALL)
def test_state_does_not_grow_with_batches(kind, scheme):
    observer = make(kind, scheme=scheme)
    sizes = []
    for _ in range(40):
        observer.update(torch.randn(4, 3, 16, 16))
        sizes.append(state_size(observer))
    assert len(set(sizes[-25:])) == 1
    assert max(sizes) <= 3 * 33_000  # channels x bins


def test_many_channels_keep_a_small_state():
    observer = make("percentile", scheme="per-channel-affine")
    feed(observer, [torch.randn(2, 2048, 7, 7) for _ in range(25)])
    assert observer.histogram.counts is not None and state_size(observer) <= 2048 * 1100
    assert observer.calc_qparams()[0].shape == (2048,)


@pytest.mark.parametrize("kind", ALL)
def test_d23_per_channel_activations_of_several_sizes(kind):
    observer = feed(make(kind, scheme="per-channel-affine"), batches("normal", channels=5))
    scale, zero_point = observer.calc_qparams()
    assert scale.shape == zero_point.shape == observer.min_val.shape == observer.max_val.shape == (5,)
    ratio = scale[1:] / scale[:-1]  # channel c is 2^c times as large
    assert ((ratio > 1.5) & (ratio < 2.7)).all()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("scheme", SCHEMES[1:3])
def test_d30_nlc_takes_2d_and_1d_input(kind, scheme):
    """Channels are the last axis of NLC; a 2-d batch is (batch, channels)."""
    size = torch.tensor([1.0, 4.0, 16.0])
    observer = make(kind, scheme=scheme, layout="NLC")
    feed(observer, [torch.randn(6, 20, 3) * size, torch.randn(30, 3) * size])
    scale, _ = observer.calc_qparams()
    if "channel" in scheme:
        assert scale[0] < scale[1] / 2 < scale[2] / 4
    else:
        assert scale.shape == (1,)
    one = feed(make(kind, scheme=scheme, layout="NLC"), [torch.randn(3), torch.tensor(2.0) * torch.ones(3)])
    assert one.calc_qparams()[0].shape == ((3,) if "channel" in scheme else (1,))


@pytest.mark.parametrize("kind", HISTOGRAM)
def test_d30_many_2d_batches(kind):
    """(batch, channels) input is a transposed view inside; it must be counted as well as kept."""
    data = [torch.randn(9000, 3) * torch.tensor([1.0, 4.0, 16.0]) for _ in range(2)]
    observer = feed(make(kind, scheme="per-channel-affine", layout="NLC"), data)
    flat = feed(make(kind, scheme="per-channel-affine"), [torch.cat(data).T.reshape(1, 3, 9000, 2)])
    same(observer, flat, kind)


def test_d31_ch_axis():
    assert make("minmax").ch_axis == 1
    assert make("minmax", layout="NLC").ch_axis == 2
    assert make("minmax", "w", "per-channel-symmetric").ch_axis == 0


@pytest.mark.parametrize("kind", ALL)
def test_a_transposed_convolution_has_its_channels_on_axis_1(kind):
    weight = torch.randn(4, 6, 3, 3) * torch.arange(1.0, 7.0).view(1, -1, 1, 1)
    observer = make(kind, "w", "per-channel-symmetric")
    observer.qdesc.set_ch_axis(1)
    turned = feed(make(kind, "w", "per-channel-symmetric"), [weight.transpose(0, 1).contiguous()])
    for a, b in zip(range_of(feed(observer, [weight])), range_of(turned)):
        assert a.shape == (6,) and torch.allclose(a, b)


@pytest.mark.parametrize("kind", ALL)
def test_channels_last_is_the_same(kind):
    data = [torch.randn(2, 6, 40, 40) for _ in range(2)]
    turned = [x.to(memory_format=torch.channels_last) for x in data]
    for scheme in SCHEMES[1:3]:
        for a, b in zip(
            range_of(feed(make(kind, scheme=scheme), data)), range_of(feed(make(kind, scheme=scheme), turned))
        ):
            assert torch.allclose(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("kind", ALL)
def test_other_types_are_computed_in_float32(kind, dtype):
    data = [(x * 3).to(dtype) for x in batches("normal")]
    got, want = feed(make(kind), data), feed(make(kind), [x.float() for x in data])
    scale, zero_point = got.calc_qparams()
    assert scale.dtype == zero_point.dtype == got.min_val.dtype == torch.float32
    same(got, want, kind)


@pytest.mark.parametrize("kind", ALL)
def test_empty_batches_are_ignored(kind):
    observer = feed(make(kind), [torch.empty(0, 3, 8, 8), torch.randn(2, 3, 8, 8), torch.empty(2, 3, 0, 8)])
    assert observer.batches == 1 and observer.has_data
    observer.calc_qparams()
    with pytest.raises(CalibrationError, match="no data"):
        feed(make(kind), [torch.empty(0, 3)]).calc_qparams()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", SCHEMES[1:3])
@pytest.mark.parametrize("kind", ALL)
def test_nan_and_inf_are_refused(kind, scheme, bad):
    observer = feed(make(kind, scheme=scheme), batches("normal"))
    want = range_of(observer)
    x = torch.randn(2, 4, 8, 8)
    x[1, 2, 3, :5] = bad
    with pytest.raises(CalibrationError, match=r"NaN or Inf in calibration data: 5 of 512 values, batch 4"):
        observer.update(x)
    assert all(map(torch.equal, range_of(observer), want))  # the bad batch left nothing behind


def test_devices_without_an_early_check_find_nan_at_the_end():
    observer = make("minmax")
    observer._extend(torch.tensor([float("nan")]), torch.tensor([1.0]), 1)  # what update does on a GPU
    with pytest.raises(CalibrationError, match="NaN or Inf"):
        observer.calc_qparams()


def test_another_number_of_channels_is_an_error():
    observer = feed(make("minmax", scheme="per-channel-affine"), [torch.randn(2, 3, 4, 4)])
    with pytest.raises(CalibrationError, match="batch 2 has 5 channels, those before had 3"):
        observer.update(torch.randn(2, 5, 4, 4))


def test_merging_different_kinds_is_an_error():
    with pytest.raises(CalibrationError, match="cannot merge"):
        make("minmax").merge(make("mse"))


@pytest.mark.parametrize("scheme", SCHEMES[1:3])
@pytest.mark.parametrize("kind", ALL)
def test_state_dict_round_trip(kind, scheme):
    observer = feed(make(kind, scheme=scheme), batches("normal"))
    fresh = make(kind, scheme=scheme)
    assert set(observer.state_dict()) == {"min_val", "max_val"}
    fresh.load_state_dict(observer.state_dict())  # not calibrated yet: scalars
    assert fresh.min_val.shape == ()
    observer.calc_qparams()
    fresh.load_state_dict(observer.state_dict())
    assert torch.equal(fresh.min_val, observer.min_val) and torch.equal(fresh.max_val, observer.max_val)
    observer.load_state_dict(make(kind, scheme=scheme).state_dict())
    assert observer.min_val.shape == ()


@pytest.mark.parametrize("kind", ALL)
def test_reset_forgets_and_a_copy_is_independent(kind):
    observer = feed(make(kind), batches("normal"))
    want = range_of(observer)
    twin = copy.deepcopy(observer)
    observer.reset()
    assert not observer.has_data and torch.equal(observer.min_val, want[0])
    with pytest.raises(CalibrationError):
        observer.calc_qparams()
    feed(twin, [torch.full((1, 4, 2, 2), 1e4)])
    assert range_of(feed(observer, batches("normal")))[1] < 100


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_constant_and_dead_channels(kind, scheme):
    x = torch.zeros(2, 3, 6, 6)
    x[:, 1] = 2.5
    scale, zero_point = feed(make(kind, scheme=scheme), [x, x]).calc_qparams()
    assert scale.isfinite().all() and (scale > 0).all() and zero_point.isfinite().all()
    zero = feed(make(kind, scheme=scheme), [torch.zeros(2, 3, 6, 6)])
    assert (zero.calc_qparams()[0] == 1).all()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("scale", [2.0**-90, 2.0**-13, 2.0**90])  # powers of two: the same bins, elsewhere
def test_ranges_follow_the_scale_of_the_data(kind, scale):
    many = batches("normal")
    few = [x[:1, :, :5, :5] for x in many]
    for data in (many, few):  # counted, and kept
        plain, scaled = (
            range_of(feed(make(kind), data)),
            range_of(feed(make(kind), [x * scale for x in data])),
        )
        assert torch.allclose(torch.cat(scaled).double() / scale, torch.cat(plain).double(), rtol=1e-5)


def test_inplace_changes_after_update_do_not_matter():
    x = torch.randn(2, 3, 8, 8)
    for kind in ALL:
        observer, y = make(kind), x.clone()
        observer.update(y)
        y.mul_(100)
        same(observer, feed(make(kind), [x]), kind)


# -- plug-ins and the old API --------------------------------------------------------------------------------
def test_registry():
    assert set(ALL) <= set(OBSERVERS_MAP)
    assert type(make("MinMax")) is OBSERVERS_MAP["MINMAX"]
    with pytest.raises(RegistryError, match="did you mean percentile"):
        OBSERVERS_MAP["percentil"]
    for name in ("minmax", "mse", "percentile", "kl_histogram", "aciq", "moving_average"):
        module = __import__(f"sparsebit.quantization.observers.{name}", fromlist=["Observer"])
        assert module.Observer is OBSERVERS_MAP[name]
    assert base.Observer is Observer and base.DataCache is DataCache


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"PERCENTILE\.ALPHA"):
        tensor_config("percentile", alpha=1.5)
    with pytest.raises(ConfigError, match=r"ACIQ\.DISTRIBUTION"):
        tensor_config("aciq", distribution="cauchy")
    assert tensor_config("aciq", distribution="LAPLACE").observer.params().distribution == "laplace"


class OldStyle(Observer):
    TYPE = "old_style_of_the_test"

    def __init__(self, config, qdesc):
        super().__init__(config, qdesc)

    def calc_minmax(self):
        if self.is_perchannel:
            data = self.data_cache.get_data_for_calibration(Granularity.CHANNELWISE)
            low, high = data.min(axis=1).values, data.max(axis=1).values
        else:
            data = self.data_cache.get_data_for_calibration(Granularity.LAYERWISE)
            low, high = data.min(), data.max()
        self.data_cache.reset()
        self.min_val, self.max_val = low.to(self.device), high.to(self.device)
        return self.min_val, self.max_val


class OldStyleCaching(OldStyle, CachingObserver):
    TYPE = "old_style_of_the_test_caching"


@pytest.mark.parametrize("cls", [OldStyle, OldStyleCaching])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_observers_of_the_old_api_find_their_data(cls, scheme, monkeypatch):
    monkeypatch.setattr(OBSERVERS_MAP, "_items", dict(OBSERVERS_MAP._items))
    assert register_observer(cls) is cls
    cfg = tensor_config(cls.TYPE, scheme=scheme)
    observer, other = (build_observer(cfg, QuantDescriptor(cfg)) for _ in range(2))
    data = batches("normal")
    feed(observer, data[:2])
    assert len(observer.data_cache) == 2 and observer.data_cache.get_batch_size() == 4
    observer.merge(feed(other, data[2:]))
    want = range_of(feed(make("minmax", scheme=scheme), data))
    assert all(map(torch.equal, range_of(observer), want))
    assert len(observer.data_cache) == 0


class AbsMean(Observer):
    """Three times the mean of |x|: the whole of a new streaming observer."""

    TYPE = "abs_mean_of_the_test"

    def reset(self):
        super().reset()
        self.total, self.count = 0.0, 0

    def accumulate(self, x):
        self.total, self.count = self.total + x.abs().sum(1, dtype=torch.float64), self.count + x.shape[1]

    def calc_minmax(self):
        return -3 * self.total / self.count, 3 * self.total / self.count

    def merge(self, other):
        super().merge(other)
        self.total, self.count = self.total + other.total, self.count + other.count


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_new_observer_is_a_short_class(scheme):
    cfg = tensor_config("minmax", scheme=scheme)
    first, second = (AbsMean(cfg, QuantDescriptor(cfg)) for _ in range(2))
    data = batches("normal")
    feed(first, data[:1]).merge(feed(second, data[1:]))
    axis = 1 if "channel" in scheme else None
    assert not first.kept
    assert torch.allclose(range_of(first)[1], 3 * rows_of(data, axis).abs().mean(1))


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("bit", [1, 2, 8, 12, 16])
@pytest.mark.parametrize("scheme", SCHEMES[:2])
def test_all_widths(kind, bit, scheme):
    data = batches("normal")
    low, high = range_of(feed(make(kind, scheme=scheme, bit=bit), data))
    true_low, true_high = rows_of(data, None).aminmax()
    assert 1.6 * true_low <= low <= 0 <= high <= 1.6 * true_high and high - low > 1


def test_cached_batches_are_copies():
    cfg = tensor_config("minmax")
    observer, x = OldStyle(cfg, QuantDescriptor(cfg)), torch.randn(2, 3)
    want = x.max().item()
    observer.update(x)
    x.mul_(100)
    assert range_of(observer)[1].item() == want


def test_streaming_observers_cache_nothing():
    assert all(not feed(make(kind), batches("normal")).kept for kind in ALL)


def test_repr_is_one_line():
    for kind in ALL:
        text = repr(feed(make(kind), batches("normal")))
        assert "\n" not in text and kind in text and "batches=3" in text
