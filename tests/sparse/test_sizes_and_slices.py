"""Sizes in a pruned graph stay free, slices follow the channels they meant, and nothing is cut from what hides it."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from sparsebit.sparse import SparseModel


class Between(nn.Module):
    """layer, something, layer."""

    def __init__(self, first, between, last):
        super().__init__()
        self.a, self.between, self.b = first, between, last

    def forward(self, x):
        return self.between(self, x)


def linears(between, middle=16, ins=8, width=16):
    return Between(nn.Linear(ins, width), between, nn.Linear(middle, 4))


def convs(between, middle=16):
    return Between(nn.Conv2d(3, 16, 3, padding=1), between, nn.Conv2d(middle, 4, 1))


def agree(net, x, *others, heads="whole", ratio=0.5):
    """The compact model, compared with the masked one on the example and on inputs of other sizes."""
    torch.manual_seed(0)
    smodel = SparseModel(net.eval(), {"SPARSER": {"RATIO": ratio, "HEADS": heads}}, x)
    smodel.calc_params()
    smodel.eval()
    small = smodel.compact()
    with torch.no_grad():
        for each in (x, *others):
            torch.testing.assert_close(small(each.clone()), smodel(each.clone()), rtol=1e-4, atol=1e-5)
    return small, smodel.plan


def image(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# -- what hides tensors ----------------------------------------------------------------------------------
@dataclasses.dataclass
class Out:
    logits: torch.Tensor


class Named(collections.OrderedDict):
    pass


@pytest.mark.parametrize("pack", [Out, lambda t: Named(logits=t)])
def test_outputs_in_any_container_stay_whole(pack):
    net = linears(lambda s, x: pack(s.b(torch.relu(s.a(x)))))
    small = sparsebit.prune(net.eval(), torch.randn(2, 8), ratio=0.5)
    out = small(torch.randn(3, 8))
    out = out.logits if isinstance(out, Out) else out["logits"]
    assert out.shape == (3, 4) and small.a.out_features == 8


def test_the_users_class_is_compared_inside_its_output():
    """Its own code would divide by the new width."""
    net, x = linears(lambda s, x: Out(s.b(s.a(x) / s.a(x).shape[1]))), torch.randn(2, 8)
    smodel = SparseModel(net.eval(), {"SPARSER": {"RATIO": 0.5}}, x)
    smodel.calc_params()
    small = smodel.compact()
    assert small.a.out_features == 8
    torch.testing.assert_close(small(x).logits, smodel(x).logits)


def test_a_value_read_as_a_number_is_kept_with_a_reason():
    net = linears(lambda s, x: s.b(s.a(x) * s.a(x)[0, 0].item()))
    small, plan = agree(net, torch.randn(2, 8))
    assert any("item" in why for why in plan.reasons) and small.a.out_features == 16


# -- sizes that are computed -----------------------------------------------------------------------------
class Heads(nn.Module):
    """fairseq's: heads are moved into the batch."""

    def __init__(self, d=32, h=4):
        super().__init__()
        self.h, self.qkv, self.o = h, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = (
            t.view(B, N, self.h, -1).transpose(1, 2).reshape(B * self.h, N, C // self.h)
            for t in self.qkv(x).chunk(3, -1)
        )
        y = torch.bmm(q, k.transpose(1, 2)).softmax(-1) @ v
        torch._assert(y.shape[0] == B * self.h, "heads")
        y = y.view(y.shape[0] // self.h, self.h, N, -1)
        return self.o(y.transpose(1, 2).reshape(B, N, -1))


class HeadsOfBert(nn.Module):
    """Shapes are made by adding tuples."""

    def __init__(self, d=32, h=4):
        super().__init__()
        self.h, self.hd, self.v, self.o = h, d // h, nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        v = self.v(x)
        v = v.view(v.size()[:-1] + (self.h, self.hd)).permute(0, 2, 1, 3)
        c = F.scaled_dot_product_attention(v, v, v).permute(0, 2, 1, 3).contiguous()
        return self.o(c.view(c.size()[:-2] + (self.h * self.hd,)))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", ["whole", "dimension"])
@pytest.mark.parametrize("kind", [Heads, HeadsOfBert])
def test_batch_and_length_stay_free(kind, heads, batch):
    torch.manual_seed(0)
    others = [torch.randn(b, n, 32) for b, n in ((3, 6), (1, 9), (4, 2))]
    small, _ = agree(kind(), torch.randn(batch, 6, 32), *others, heads=heads)
    assert sum(p.numel() for p in small.parameters()) < 0.6 * sum(p.numel() for p in kind().parameters())


@pytest.mark.parametrize(
    "net",
    [
        convs(lambda s, x: _scaled(s, x, lambda b, c, h, w: c * h * w)),
        convs(lambda s, x: _scaled(s, x, lambda b, c, h, w: (h * w * c) ** 0.5)),
        convs(lambda s, x: s.b(s.a(x) / s.a(x).numel())),
        convs(lambda s, x: s.b(s.a(x) / s.a(x).shape[1:].numel())),
        convs(lambda s, x: s.b(s.a(x) * torch.ones(s.a(x).shape[1]).sum())),
        convs(lambda s, x: _and_back(s, x, lambda y: y.view(y.size(0), 16 * y.shape[2], y.shape[3]), x.shape[2])),
        convs(lambda s, x: _and_back(s, x, lambda y: y.reshape(y.size(0), y.size(1) * y.size(2), -1), x.shape[2])),
        convs(lambda s, x: s.b(s.a(x).flatten(1, 2).unflatten(1, (s.a(x).shape[1], x.shape[2])))),
        convs(lambda s, x: s.b(s.a(x).view(s.a(x).shape).expand(s.a(x).size()))),
        convs(lambda s, x: s.b(s.a(x).mT.contiguous().mT + s.a(x).new_zeros(s.a(x).shape))),
        convs(lambda s, x: s.b(s.a(x) + torch.linalg.vector_norm(s.a(x), dim=(2, 3), keepdim=True))),
        convs(lambda s, x: s.b(s.a(x) - torch.var_mean(s.a(x), (2, 3), keepdim=True)[1])),
    ],
)  # fmt: skip
def test_only_channels_become_constant(net):
    small, plan = agree(net, image(2, 3, 8, 8), image(2, 3, 8, 12), image(3, 3, 6, 4), image(1, 3, 5, 8))
    assert small.a.out_channels == 8, plan.reasons


def _scaled(s, x, number):
    y = s.a(x)
    b, c, h, w = y.shape
    return s.b(y / number(b, c, h, w))


def _and_back(s, x, there, height):
    y = there(s.a(x).relu())
    return s.b(y.view(y.shape[0], y.shape[1] // height, height, y.shape[2]))


def test_checks_of_sizes_hold():
    def between(s, x):
        y = s.a(x)
        torch._assert(y.shape[1] == 16, "channels")
        torch._assert(y.shape == (x.shape[0], 16), "shape")
        return s.b(y)

    small, _ = agree(linears(between), torch.randn(2, 8), torch.randn(5, 8))
    assert small.a.out_features == 8


# -- slices ----------------------------------------------------------------------------------------------
def halves(s, x):
    y = s.a(x)
    return s.b(y[:, : y.shape[1] // 2] * torch.sigmoid(y[:, y.shape[1] // 2 :]))


@pytest.mark.parametrize(
    "between, middle",
    [
        (lambda s, x: s.b(s.a(x)[:, : s.a(x).shape[1] // 2]), 8),
        (lambda s, x: s.b(s.a(x)[..., s.a(x).size(-1) // 4 :]), 12),
        (lambda s, x: s.b(s.a(x)[:, -5:]), 5),
        (lambda s, x: s.b(s.a(x)[:, 1:-3]), 12),
        (lambda s, x: s.b(s.a(x).narrow(1, s.a(x).shape[1] // 2, s.a(x).shape[1] // 4)), 4),
        (lambda s, x: s.b(F.pad(s.a(x), (0, -4))), 12),
        (lambda s, x: s.b(F.pad(s.a(x), (-3, 2))), 15),
        (lambda s, x: s.b(F.pad(s.a(x)[:, :8], (0, s.a(x).shape[1] - 8))), 16),
        (lambda s, x: s.b(torch.cat(s.a(x).split(s.a(x).shape[1] // 2, 1)[::-1], 1)), 16),
        (lambda s, x: s.b(torch.cat(s.a(x).chunk(2, dim=x.dim() - 1)[::-1], 1)), 16),
        (halves, 8),
    ],
)
def test_slices_follow_the_channels(between, middle):
    small, plan = agree(linears(between, middle), torch.randn(2, 8), torch.randn(5, 8))
    assert small.a.out_features < 16, plan.reasons
    assert small.b.in_features < middle


def test_channels_cropped_from_an_image():
    small, _ = agree(
        convs(lambda s, x: s.b(F.pad(s.a(x), (1, 0, 0, 0, 0, -4))), 12), image(2, 3, 8, 8), image(1, 3, 5, 4)
    )
    assert small.a.out_channels == 8


def test_a_slice_by_a_size_of_the_input_stays_free():
    net = convs(lambda s, x: s.b(s.a(x)[:, :8, : x.shape[2] // 2]), 8)
    agree(net, image(2, 3, 8, 8), image(2, 3, 12, 6))


# -- writes ----------------------------------------------------------------------------------------------
def written(change, made=lambda y: y):
    def between(s, x):
        y = s.a(x)
        out = made(y)
        change(out, y)
        return s.b(out)

    return between


def first_four(out, y):
    out[:, :4] = y[:, 4:8].relu()


def add_one(out, y):
    out[:, :4] += 1


def by_size(out, y):
    out[:, : y.shape[1] // 2] = 2 * y[:, y.shape[1] // 2 :]


def shift(out, y):
    out[:, :, 1:] = y[:, :, :-1]


def fold(out, y):
    out[1:, :4] = y[:-1, :4]
    out[:-1, 4:8] = y[1:, 4:8]
    out[:, 8:] = y[:, 8:]


@pytest.mark.parametrize("change", [first_four, add_one, by_size, shift, fold])
@pytest.mark.parametrize("made", [torch.relu, torch.zeros_like, lambda y: y.new_zeros(y.shape)])
def test_writes_follow_the_channels(change, made):
    small, plan = agree(convs(written(change, made)), image(2, 3, 8, 8), image(4, 3, 5, 7))
    assert small.a.out_channels < 16, plan.reasons


@pytest.mark.parametrize(
    "change, made, reason",
    [
        (shift, lambda y: torch.zeros(y.shape), "written into a tensor that is kept"),
        (lambda out, y: out.__setitem__((slice(None), 3), y[:, 0]), torch.relu, "single position"),
        (lambda out, y: out.__setitem__(y > 0, 1.0), torch.relu, "setitem"),
        (lambda out, y: out.__setitem__((slice(None), slice(0, 8, 2)), 1.0), torch.relu, "single position"),
    ],
)
def test_other_writes_are_kept_with_a_reason(change, made, reason):
    small, plan = agree(convs(written(change, made)), image(2, 3, 8, 8), image(4, 3, 5, 7))
    assert small.a.out_channels == 16 and any(reason in why for why in plan.reasons), plan.reasons


def test_a_sum_knows_what_was_written():
    """The channels of `y` are zero where they are masked, until a number is written there: also under another name."""

    def between(s, x):
        y = s.a(x)
        same = y.view(-1, 16)
        y[:, :8] = 1.0
        return s.b(same.sum(1, keepdim=True))

    small, plan = agree(linears(between, 1), torch.randn(2, 8))
    assert small.a.out_features == 16 and any("sum" in why for why in plan.reasons)


def test_an_input_that_is_written_to():
    def between(s, x):
        x[:, 0] = x[:, 0] * 3
        return s.b(s.a(x).relu())

    x = torch.randn(2, 8)
    before = x.clone()
    small, _ = agree(linears(between), x, torch.randn(3, 8))
    assert small.a.out_features == 8 and torch.equal(x, before)
