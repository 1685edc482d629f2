"""Residual blocks side by side: unfitted trials equal the sum by hand, the fit is least squares, cuts follow."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_depth import Block
from torch import nn

import sparsebit
from models import randomise
from sparsebit.errors import ConfigError
from sparsebit.sparse import merge
from sparsebit.sparse.choose.costs import macs
from sparsebit.sparse.depth import merge_blocks
from sparsebit.sparse.depth.merge_blocks import _side_by_side, find_pairs
from sparsebit.sparse.labels.walk import walk_of
from sparsebit.sparse.mend.least_squares import DAMPING
from sparsebit.sparse.prune import prune_blocks
from sparsebit.sparse.trace.front_end import call_of, traced


class Net(nn.Module):
    """Three blocks of one form, one at half the size, two more; += and a ReLU that writes into its input."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.blocks = nn.Sequential(
            Block(8, 8), Block(8, 8), Block(8, 8), Block(8, 16, 2), Block(16, 16), Block(16, 16)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        early = self.stem(x)
        return self.head(self.blocks(early).mean((2, 3))), early


class Bare(nn.Module):
    """No norms, nothing behind the addition, functions in place of modules."""

    def __init__(self, bias=True):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, 1, 1, bias=bias) for _ in range(6))

    def forward(self, x):
        for first, last in zip(self.convs[::2], self.convs[1::2]):
            x = last(F.silu(first(x))) + x
        return x


@pytest.fixture
def net():
    torch.manual_seed(0)
    return randomise(Net()).eval(), torch.randn(4, 3, 8, 8)


def branch(block, x):
    return block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))


def names(model, x):
    return [
        (p.first.name, p.second.name, *p.widths) for p in find_pairs(traced(model, call_of(x, model)).eval())
    ]


def test_what_is_found(net):
    assert names(*net) == [
        ("blocks.0", "blocks.1", 8, 8),
        ("blocks.1", "blocks.2", 8, 8),
        ("blocks.4", "blocks.5", 16, 16),
    ]


@pytest.mark.parametrize("change", ["kernel", "activation", "shared", "groups", "stride", "read by another"])
def test_what_is_not(net, change):
    model, x = net
    block = model.blocks[4]
    if change == "kernel":
        block.conv2 = nn.Conv2d(16, 16, 1, bias=False)
    elif change == "activation":
        block.relu = nn.ReLU6()
    elif change == "shared":
        model.blocks[5].conv1 = block.conv1
    elif change == "groups":
        block.conv1 = nn.Conv2d(16, 16, 3, 1, 1, groups=2, bias=False)
    elif change == "stride":
        block.conv1, block.conv2 = nn.Conv2d(16, 16, 3, 2, 1), nn.ConvTranspose2d(16, 16, 2, 2)
    else:
        model.blocks[4] = nn.Sequential(block, nn.Dropout2d(0.1))
    assert ("blocks.4", "blocks.5", 16, 16) not in names(model, x)
    assert ("blocks.0", "blocks.1", 8, 8) in names(model, x)


@torch.no_grad()
def test_side_by_side_is_the_sum_of_both(net):
    model, x = net
    whole = traced(model, call_of(x, model)).eval()
    pair = find_pairs(whole)[1]
    given = x.clone()
    got, early = _side_by_side(whole, pair)(given)
    value = want_early = model.stem(x)
    value = model.blocks[0](value)
    one, two = model.blocks[1], model.blocks[2]
    value = F.relu(value + branch(one, value) + branch(two, value))
    torch.testing.assert_close(got, model.head(model.blocks[3:](value).mean((2, 3))))
    assert torch.equal(given, x) and torch.equal(early, want_early)


@torch.no_grad()
def test_the_fit_is_least_squares(net):
    """By numpy: from the inner channels of both to what they add in the whole model."""
    model, x = net
    x = torch.randn(16, 3, 8, 8)
    small = merge(model, x, ["blocks.0"], [(x[:7], None), (x[7:], None)])
    assert small.merged == ["blocks.0"]
    early = model.stem(x)
    middle = model.blocks[0](early.clone())
    want = middle + branch(model.blocks[1], middle) - early
    one, two = model.blocks[0], model.blocks[1]
    inner = torch.cat([F.relu(b.bn1(b.conv1(early))) for b in (one, two)], 1)
    rows = F.unfold(inner, 3, padding=1).mT.flatten(0, 1).double().numpy()
    target = want.movedim(1, -1).flatten(0, 2).double().numpy()
    moved = rows - rows.mean(0)
    ridge = np.sqrt(DAMPING[0] * moved.var(0).mean() * len(rows)) * np.eye(rows.shape[1])
    weights = np.linalg.lstsq(
        np.concatenate([moved, ridge]),
        np.concatenate([target - target.mean(0), np.zeros((len(ridge), 8))]),
        rcond=None,
    )[0]
    best = moved @ weights + target.mean(0)
    wide = small.blocks.get_submodule("1")
    assert wide.conv1.weight.shape == (16, 8, 3, 3) and wide.conv2.weight.shape == (8, 16, 3, 3)
    assert wide.conv1.out_channels == wide.bn1.num_features == wide.conv2.in_channels == 16
    fitted = wide.bn2(wide.conv2(inner))
    np.testing.assert_allclose(fitted.movedim(1, -1).flatten(0, 2), best, atol=1e-4)
    # the statistics are those of these batches: in training it computes the same
    torch.testing.assert_close(wide.bn2.train()(wide.conv2(inner)), fitted, rtol=0.01, atol=0.01)
    # as long as the filters of both, side by side
    long = torch.cat([one.conv2.weight, two.conv2.weight], 1).flatten(1).norm(dim=1).mean()
    torch.testing.assert_close(wide.conv2.weight.flatten(1).norm(dim=1), long.expand(8))


@torch.no_grad()
def test_a_block_that_does_nothing_merges_without_loss(net):
    model, x = net
    for name in ("weight", "bias"):
        getattr(model.blocks[4].bn2, name).zero_()
    before = copy.deepcopy(model.state_dict())
    many = torch.randn(256, 3, 8, 8)
    small = merge(model.train(), x, ["blocks.4"], [many])
    assert small.merged == ["blocks.4"] and small.training and model.training
    for got, want in zip(small.eval()(x), model.eval()(x)):
        assert (got - want).square().sum() < 1e-4 * want.square().sum()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert macs(walk_of(model, x))(small) == macs(walk_of(model, x))(model)
    for a, b in zip(pickle.loads(pickle.dumps(small))(x), small(x)):
        assert torch.equal(a, b)


def test_pairs_first_the_narrowest_before_others_and_more_than_two_at_last(net):
    model, x = net
    one = merge(model, x, 1, [x]).merged
    assert one[0] in ("blocks.0", "blocks.1")
    assert merge(model, x, 2, [x]).merged == [*one, "blocks.4"]
    everything = merge(model, x, 3, [x])
    assert set(everything.merged) == {"blocks.0", "blocks.1", "blocks.4"}
    assert everything.blocks.get_submodule("2").conv1.out_channels == 24


def test_auto_merges_every_pair_of_narrow_blocks_once():
    torch.manual_seed(0)
    stem, x = nn.Conv2d(3, 16, 1), torch.randn(4, 3, 8, 8)
    narrow = [*(Block(16, 16) for _ in range(5)), Block(16, 32, 2), Block(32, 32), Block(32, 32)]
    blocks = [*narrow, Block(32, 48, 2), Block(48, 48), Block(48, 48)]
    model = randomise(nn.Sequential(stem, *blocks)).eval()
    merged = merge(model, x, "auto", [x]).merged
    *first, last = merged
    assert last == "7" and len(first) == 2 and set(first) < {"1", "2", "3", "4"}
    assert abs(int(first[0]) - int(first[1])) >= 2  # two pairs of the five, never three blocks in one
    small = prune_blocks(model, x, 0.5, merge="auto", batches=[x], progress=False)
    assert small.pruning_plan.merged == merged
    wide = nn.Sequential(nn.Conv2d(3, 48, 1), Block(48, 48), Block(48, 48)).eval()
    wide = prune_blocks(wide, x, 0.5, merge="auto", batches=[x], progress=False)
    assert (
        wide.pruning_plan.merged == [] and type(wide) is nn.Sequential
    )  # nothing was done: the user's class


def test_auto_leaves_no_block_alone_that_could_be_in_a_pair():
    """Of four in a row the two in the middle would change least: they are copies that do next to nothing."""
    torch.manual_seed(0)
    model = randomise(nn.Sequential(nn.Conv2d(3, 8, 1), *(Block(8, 8) for _ in range(4)))).eval()
    for i in (2, 3):
        nn.init.constant_(model[i].bn2.weight, 1e-3)
    x = torch.randn(4, 3, 8, 8)
    assert merge(model, x, 1, [x]).merged == ["2"]
    assert sorted(merge(model, x, "auto", [x]).merged) == ["1", "3"]


def test_auto_pairs_the_blocks_of_two_branches_that_are_called_in_turn():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.ModuleList(Block(8, 8) for _ in range(4)) for _ in range(2))
            for block in (*self.a[1:3], *self.b[1:3]):  # those in the middle would go first
                nn.init.constant_(block.bn2.weight, 1e-3)

        def forward(self, x):
            u = v = x
            for p, q in zip(self.a, self.b):
                u, v = p(u), q(v)
            return u, v

    torch.manual_seed(0)
    x = torch.randn(2, 8, 8, 8)
    assert sorted(merge(Turns().eval(), x, "auto", [x]).merged) == ["a.0", "a.2", "b.0", "b.2"]


def test_few_samples_choose_and_all_of_them_fit(net, monkeypatch):
    model, x = net
    seen = []
    values = merge_blocks.values_at
    monkeypatch.setattr(merge_blocks, "CHOICE", 6)
    monkeypatch.setattr(
        merge_blocks, "values_at", lambda gm, at, call: seen.append(call) or values(gm, at, call)
    )
    batches = [torch.randn(4, 3, 8, 8) for _ in range(5)]
    small = merge(model, x, 1, batches)
    assert len(names(model, x)) > 1 and len(seen) == 2 * (1 + 2) + 5 * (1 + 1)  # the whole and each trial
    again = merge(model, x, small.merged, batches)
    torch.testing.assert_close(small(x), again(x))


def test_the_pair_that_goes_is_the_one_that_changes_the_output_least_once_fitted(net):
    model, x = net
    errors = {}
    for goes, *_ in names(model, x)[:2]:  # those of 8 channels go first
        small = merge(model, x, [goes], [x])
        errors[goes] = sum((a - b).square().sum().item() for a, b in zip(small(x), model(x)))
    assert merge(model, x, 1, [x]).merged == [min(errors, key=errors.get)]


@pytest.mark.parametrize("bias", [True, False])
def test_without_norms(bias):
    torch.manual_seed(0)
    model, x = Bare(bias).eval(), torch.randn(4, 4, 8, 8)
    assert [pair[:2] for pair in names(model, x)] == [
        ("convs:add", "convs:add_1"),
        ("convs:add_1", "convs:add_2"),
    ]
    many = torch.randn(32, 4, 8, 8)
    small = merge(model, x, 2, [many])
    error = (small(x) - model(x)).square().mean() / (model(x) - x).square().mean()
    assert error < 0.1
    small(x).sum().backward()
    fresh = merge(Bare(bias).eval(), x, small.merged)
    fresh.load_state_dict(small.state_dict())
    assert torch.equal(fresh(x), small(x))


@torch.no_grad()
def test_biases_in_front_of_norms(net):
    """They change nothing behind a norm that is fitted: the same model without them merges to the same."""
    model, x = net
    biased = copy.deepcopy(model)
    for block in biased.blocks:
        block.conv1.bias, block.conv2.bias = nn.Parameter(torch.ones(block.conv1.out_channels)), None
        block.conv2.bias = nn.Parameter(torch.full((block.conv2.out_channels,), 3.0))
        block.bn1.running_mean += 1
        block.bn2.running_mean += 3
    many = torch.randn(16, 3, 8, 8)
    for got, want in zip(merge(biased, x, ["blocks.0"], [many])(x), merge(model, x, ["blocks.0"], [many])(x)):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_weights_load_into_the_same_merge_of_a_fresh_model(net):
    model, x = net
    small = merge(model, x, 2, [x])
    torch.manual_seed(1)
    fresh = merge(randomise(Net()).eval(), x, small.merged)
    fresh.load_state_dict(small.state_dict())
    for a, b in zip(fresh(x), small(x)):
        assert torch.equal(a, b)


def test_merged_then_cut_quantized_and_exported(net, tmp_path):
    model, x = net
    small = sparsebit.prune(model, x, macs=0.5, round_to=8, merge=2, batches=[x, x + 1], progress=False)
    count = macs(walk_of(model, x))
    assert count(small) <= 0.5 * count(model) and len(small.pruning_plan.merged) == 2
    assert all(m.out_channels % 8 == 0 for m in small.modules() if isinstance(m, nn.Conv2d))
    names = small.pruning_plan.merged
    again = sparsebit.prune(model, x, macs=0.5, round_to=8, merge=names, batches=[x, x + 1], progress=False)
    for a, b in zip(again(x), small(x)):
        torch.testing.assert_close(a, b)
    qmodel = sparsebit.quantize(small, [x], progress=False)
    assert qmodel.export_onnx(x, str(tmp_path / "small.onnx")).ok


@pytest.mark.parametrize(
    "options, message",
    [
        ({"merge": 1}, "pass batches"),
        ({"merge": "auto"}, "pass batches"),
        ({"merge": "block.1"}, r"there is no block\.1"),
        ({"depth": "auto", "batches": [torch.zeros(2, 3, 8, 8)]}, "depth: there is no auto"),
        ({"merge": 9, "batches": [torch.zeros(2, 3, 8, 8)]}, "only 3 can"),
        ({"merge": -1}, "merge: must be"),
        ({"merge": ["block.1"]}, r"there is no block\.1; the names are blocks\.0, blocks\.1, blocks\.4"),
        ({"merge": 1, "batches": iter([torch.zeros(2, 3, 8, 8)])}, "list or a loader"),
    ],
)
def test_refused(net, options, message):
    with pytest.raises(ConfigError, match=message):
        sparsebit.prune(*net, macs=0.5, **options)
