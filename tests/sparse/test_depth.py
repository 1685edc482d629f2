"""Branches that go whole: unfitted, the model equals one whose branch gives zeros; the fit is least squares."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import sparsebit
from models import randomise
from sparsebit.errors import ConfigError
from sparsebit.sparse.choose.costs import macs, parameters
from sparsebit.sparse.depth.shorten_branches import find_branches, shorten
from sparsebit.sparse.labels.walk import walk_of
from sparsebit.sparse.plan import Plan
from sparsebit.sparse.prune import prune_blocks


class Block(nn.Module):
    """As in torchvision: += and a ReLU that writes into its input."""

    def __init__(self, width, out, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(width, out, 1, stride) if stride > 1 else None

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.down is None else self.down(x)
        return self.relu(out)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 8), Block(8, 16, 2), Block(16, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        early = self.stem(x)
        return self.head(
            self.blocks(early).mean((2, 3))
        ), early  # a block must not write into what is given out


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attend, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.position = nn.Parameter(torch.randn(1, 4, 8))

    def forward(self, x):
        x = self.embed(x) + self.position
        q, k, v = self.attend(self.norm1(x)).chunk(3, -1)
        x = x + self.proj((q @ k.transpose(1, 2)).softmax(-1) @ v)
        return x + self.mlp(self.norm2(x))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return randomise(Net()).eval(), torch.randn(2, 3, 8, 8)


def muted(model, path):
    """The model with zeros from the layer at `path`."""
    model.get_submodule(path).register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    return model


def test_what_is_found(net):
    model, x = net
    found = {b.name: b.macs for b in find_branches(model, x)}
    linear = 8 * 8 * 64 * 2  # of the layer that stands in, for a batch of two
    assert found["blocks.0"] == found["blocks.1"] == (2 * 9 - 1) * linear
    # 8 to 16 channels at half the size, then 16 to 16; its shortcut is as dear as what would stand in
    assert found["blocks.2"] == (1.5 * 9 - 1) * linear
    assert set(found) == {f"blocks.{i}" for i in range(4)}


@pytest.mark.parametrize(
    "name, last",
    [("blocks.0", "blocks.0.bn2"), ("blocks.2", "blocks.2.bn2"), ("blocks.3", "blocks.3.bn2")],
)
def test_without_a_branch(net, name, last):
    model, x = net
    small = shorten(model, x, [name])
    assert small.shortened == [name] and parameters(small) < parameters(model)
    given = x.clone()
    got, want = small(given), muted(model, last)(x)
    assert torch.equal(given, x)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
    assert isinstance(small.get_submodule(name.replace(".", "_") + "_linear"), nn.Conv2d)
    for a, b in zip(pickle.loads(pickle.dumps(small))(x), got):
        assert torch.equal(a, b)


def test_attention_and_mlp():
    torch.manual_seed(0)
    model, x = Encoder().eval(), torch.randn(3, 4, 6)
    names = [b.name for b in find_branches(model, x)]
    assert names == ["proj", "mlp"]  # not the embedding, though a position is added to it
    fitted = shorten(model, x, ["mlp"], [x])
    assert isinstance(fitted.mlp_linear, nn.Linear) and not hasattr(fitted, "mlp_norm")
    unfitted, want = shorten(model, x, ["mlp"])(x), model(x)
    assert (fitted(x) - want).square().sum() < 0.5 * (unfitted - want).square().sum()
    torch.testing.assert_close(unfitted, muted(model, "mlp.2")(x))


def test_the_branch_that_does_least_goes_first(net):
    model, x = net
    with torch.no_grad():
        model.blocks[1].bn2.weight.zero_()  # what is left is a constant, which the linear layer has too
    small = shorten(model.train(), x, 1, [x])
    assert small.shortened == ["blocks.1"] and small.training and model.training
    both = shorten(model, x, 2, [x])
    assert both.shortened[0] == "blocks.1" and len(set(both.shortened)) == 2


def test_the_fit_is_least_squares(net):
    """By numpy, for one block: from what is in front of it to what its branch adds."""
    model, x = net
    seen = {}
    with torch.no_grad():
        hooks = [
            model.blocks[1].register_forward_hook(lambda m, args, out: seen.update(x=args[0].clone())),
            model.blocks[1].bn2.register_forward_hook(lambda m, args, out: seen.update(f=out.clone())),
        ]
        model(x)
        for hook in hooks:
            hook.remove()
        small = shorten(model, x, ["blocks.1"], [(x[:1], None), (x[1:], None)])
    rows = [v.permute(0, 2, 3, 1).reshape(-1, 8).double().numpy() for v in (seen["x"], seen["f"])]
    design = np.concatenate([rows[0], np.ones((len(rows[0]), 1))], 1)
    want = np.linalg.lstsq(design, rows[1], rcond=None)[0].T
    linear, norm = small.blocks_1_linear, small.blocks_1_norm
    filters = [conv.weight.flatten(1) for conv in (model.blocks[1].conv1, model.blocks[1].conv2)]
    size = sum(f.norm(dim=1).mean().item() for f in filters) / 2  # as long as those that they stand in for
    direction = want[:, :-1] / np.linalg.norm(want[:, :-1], axis=1, keepdims=True)
    np.testing.assert_allclose(linear.weight.detach().flatten(1), size * direction, atol=1e-3)
    with torch.no_grad():
        got = norm(linear(seen["x"]))
        # the statistics are those of these batches: in training it computes the same
        torch.testing.assert_close(norm.train()(linear(seen["x"])), got, rtol=0.01, atol=0.01)
    np.testing.assert_allclose(got.permute(0, 2, 3, 1).reshape(-1, 8), design @ want.T, atol=1e-3)


def test_weights_load_into_the_same_cut_of_a_fresh_model(net):
    model, x = net
    small = shorten(model, x, 2, [x])
    torch.manual_seed(1)
    fresh = shorten(randomise(Net()).eval(), x, small.shortened)
    fresh.load_state_dict(small.state_dict())
    for a, b in zip(fresh(x), small(x)):
        assert torch.equal(a, b)


def test_a_budget_is_a_share_of_the_whole_model(net):
    model, x = net
    small = prune_blocks(model, x, macs=0.4, depth=2, batches=[x, x + 1], progress=False)
    count = macs(walk_of(model, x))
    assert 0.3 * count(model) < count(small) <= 0.4 * count(model)
    names = small.pruning_plan.shortened
    assert len(names) == 2 and f"{names[0]}: a linear layer stands in for it" in str(small.pruning_plan)
    again = prune_blocks(model, x, macs=0.4, depth=names, batches=[x, x + 1], progress=False)
    for a, b in zip(again(x), small(x)):
        torch.testing.assert_close(a, b)


def test_the_plan_of_a_shallower_model_applies_to_a_fresh_one(net, tmp_path):
    model, x = net
    small = prune_blocks(model, x, 0.5, merge=1, depth=1, batches=[x, x + 1], progress=False)
    small.pruning_plan.save(tmp_path / "plan.json")
    torch.manual_seed(1)
    fresh = Plan.load(tmp_path / "plan.json").apply(randomise(Net()).eval())
    fresh.load_state_dict(small.state_dict())
    for a, b in zip(fresh(x), small(x)):
        assert torch.equal(a, b)
    assert fresh.pruning_plan == small.pruning_plan


def test_prune_still_takes_merge_and_depth_and_warns(net):
    model, x = net
    with pytest.warns(DeprecationWarning, match=r"depth moved to sparsebit\.sparse\.prune_blocks"):
        old = sparsebit.prune(model, x, 0.5, depth=["blocks.3"], batches=[x], progress=False)
    new = prune_blocks(model, x, 0.5, depth=["blocks.3"], batches=[x], progress=False)
    assert old.pruning_plan == new.pruning_plan and new.pruning_plan.shortened == ["blocks.3"]
    assert not {"merge", "depth"} & inspect.signature(sparsebit.prune).parameters.keys()


@pytest.mark.parametrize("function", [sparsebit.prune, prune_blocks])
def test_an_unknown_option_is_refused(net, function):
    model, x = net
    with pytest.raises(TypeError, match="unexpected keyword argument 'marcs'"):
        function(model, x, marcs=0.5)


def test_the_branch_that_matters_least_goes(net):
    model, x = net
    with torch.no_grad():
        model.blocks[3].bn2.weight.zero_()
    assert shorten(model, x, 1, [x]).shortened == ["blocks.3"]
    assert shorten(model, x, "blocks.3", [x]).shortened == ["blocks.3"]


def test_enough_gone_already(net):
    model, x = net
    small = prune_blocks(model, x, macs=0.95, depth=2, batches=[x], progress=False)
    want = shorten(model, x, 2, [x])
    assert parameters(small) == parameters(want)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"depth": 1}, "pass batches"),
        ({"depth": 9, "batches": [torch.zeros(2, 3, 8, 8)]}, "only 4 can be"),
        ({"depth": -1}, "depth: must be"),
        ({"depth": 1, "batches": iter([torch.zeros(2, 3, 8, 8)])}, "list or a loader"),
    ],
)
def test_refused(net, options, message):
    with pytest.raises(ConfigError, match=message):
        prune_blocks(*net, macs=0.5, **options)


def test_unknown_names_are_answered_with_the_known(net):
    with pytest.raises(ConfigError, match=r"there is no block\.1; the names are blocks\.0, blocks\.1"):
        shorten(*net, ["block.1"])


class Padded(nn.Module):
    """Asks for sizes inside of its branch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        h = self.a(x)
        if h.shape[2] % 2:
            h = nn.functional.pad(h, (0, 0, 0, 1))
        return x + self.b(h.relu())


def test_checks_of_sizes_do_not_keep_a_branch():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Padded(), Padded(), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    assert [branch.name for branch in find_branches(model, x)] == ["1", "2"]
    shorter = shorten(model, x, ["2"])
    left = {name.rpartition(".")[0] for name, _ in shorter.named_parameters()}
    assert {"1.a", "1.b"} <= left and not {"2.a", "2.b"} & left
    assert sum("as_decided" in str(node.target) for node in shorter.graph.nodes) == 1
