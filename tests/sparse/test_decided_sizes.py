"""Pruning of models that branch on sizes: the way of the example, and never another one in silence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import sparsebit
from sparsebit.errors import SparsebitError, TraceError
from sparsebit.sparse import SparseModel

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Asks(nn.Module):
    def __init__(self, condition):
        super().__init__()
        self.a, self.b, self.condition = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), condition

    def forward(self, x):
        h = self.a(x)
        if self.condition(h):
            h = F.avg_pool2d(h, 2)
        return self.b(h)


OF_CHANNELS = {
    "a product": lambda h: h.shape[1] * h.shape[2] > 100,
    "size": lambda h: h.size(1) * h.size(2) > 100,
    "size, from behind": lambda h: h.size(dim=-3) * h.size(2) > 100,
    "numel": lambda h: h.numel() > 4000,
    "a slice": lambda h: h.shape[1:3].numel() > 100,
    "what is made of it": lambda h: h.flatten(1).shape[1] > 1000,
}
OF_POSITIONS = {
    "shape": lambda h: h.shape[2] > 12,
    "size": lambda h: h.size(-1) > 12,
    "all of it, unpacked": lambda h: (lambda b, c, i, j: i * j > 144)(*h.shape),
    "axes": lambda h: h.dim() > 4 or h.shape[0] > 4,
}


@pytest.mark.parametrize("name", OF_CHANNELS)
def test_an_if_on_channels_goes_the_way_of_the_whole_model(name):
    model = Asks(OF_CHANNELS[name]).eval()
    small = sparsebit.prune(model, X, 0.5)
    assert isinstance(small, fx.GraphModule) and small.a.out_channels == 4
    assert small(X).shape == model(X).shape == (2, 4, 8, 8)
    large = torch.randn(2, 3, 16, 16)
    assert model(large).shape == (2, 4, 8, 8)
    with pytest.raises(TraceError, match="another branch"):
        small(large)


@pytest.mark.parametrize("name", OF_POSITIONS)
def test_an_if_on_positions_leaves_the_users_class(name):
    model = Asks(OF_POSITIONS[name]).eval()
    small = sparsebit.prune(model, X, 0.5)
    assert type(small) is Asks and small.a.out_channels == 4
    for x in (X, torch.randn(8, 3, 16, 16)):
        assert small(x).shape == model(x).shape


def test_a_model_that_asks_for_gradients_trains():
    model = Asks(lambda h: h.requires_grad and h.shape[0] > 100)
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, X).train()
    smodel.calc_params()
    smodel(X).sum().backward()


# -- statistics over channels ------------------------------------------------------------------------------
class Centred(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.a, self.b, self.of = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1), of

    def forward(self, x):
        h = self.a(x)
        return self.b(h - self.of(h))


@pytest.mark.parametrize(
    "of",
    [
        lambda h: h.mean((1, 2, 3), keepdim=True),
        lambda h: h.flatten(1).mean(1)[:, None, None, None],
        lambda h: h.view(len(h), 1, -1).mean(2)[..., None, None],
        lambda h: h.mean((2, 3), keepdim=True),
    ],
)
def test_statistics_are_right_at_every_size(of):
    smodel = SparseModel(Centred(of).eval(), {"SPARSER": {"RATIO": 0.5}}, X)
    smodel.calc_params()
    small = smodel.compact()
    for n in (4, 8, 12):
        x = torch.randn(3, 3, n, n)
        torch.testing.assert_close(smodel(x), small(x), rtol=1e-4, atol=1e-5)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 8)

    def forward(self, x):
        return self.a(x).max(1)


def test_places_that_are_given_back_stay():
    model, x = Pair().eval(), torch.randn(5, 3)
    assert torch.equal(sparsebit.prune(model, x, 0.5)(x)[1], model(x).indices)


class Deviation(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.a(x)
        return self.b(h / (h.std(-1, keepdim=True) + 1e-3))


def test_what_becomes_nan_is_refused():
    with pytest.raises(SparsebitError, match=r"std: is NaN after pruning"):
        sparsebit.prune(Deviation().eval(), torch.randn(5, 3), 0.9)


class NormedTwice(nn.Module):
    """Without weights, on two streams."""

    def __init__(self, norm):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(16, 4, 1)
        self.norm = norm

    def forward(self, x):
        return self.c(torch.cat([self.norm(self.a(x)), self.norm(self.b(x))], 1))


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("norm", [nn.GroupNorm(1, 8, affine=False), ChannelsLast(), nn.GroupNorm(1, 8)])
def test_norms_without_weights_are_cut(norm):
    smodel = SparseModel(NormedTwice(norm).eval(), {"SPARSER": {"RATIO": 0.5}}, X)
    smodel.calc_params()
    small = smodel.compact()
    assert small.a.out_channels == small.b.out_channels == 4
    torch.testing.assert_close(small(X), smodel(X), rtol=1e-4, atol=1e-5)


def test_means_over_positions_are_exported_with_their_masks():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), Mean(), nn.Linear(8, 4)).eval()
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, X)
    smodel.calc_params()
    exported = torch.export.export(smodel.model, (X,)).module()
    torch.testing.assert_close(exported(X), smodel(X))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))
