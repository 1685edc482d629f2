"""Pruning by channel labels: the cut model equals the masked one, on every way of handling channels."""

from __future__ import annotations

import pickle

import channel_nets
import pytest
import torch
from torch.utils import _pytree as pytree

import sparsebit
from models import randomise
from sparsebit.errors import ConfigError
from sparsebit.sparse.choose.allocate import uniform
from sparsebit.sparse.choose.costs import macs
from sparsebit.sparse.cut.surgery import Cut, check_equal
from sparsebit.sparse.labels.walk import walk_of
from sparsebit.sparse.plan import Plan
from sparsebit.sparse.prune import prune
from sparsebit.sparse.trace.front_end import call_of

ONE_SIZE = {"fused qkv"}  # of another length its table would be viewed as one for a single head
SMALLER = dict.fromkeys(channel_nets.ARCHITECTURES, 0.62) | {  # share of the parameters left at ratio 0.5
    "mixer": 0.8,  # the tokens are mixed by layers whose channels pass by
    "flat": 0.75,
}


def chosen(walk, ratio):
    """Any channels will do here."""
    return uniform(walk, torch.rand(len(walk.labels), generator=torch.Generator().manual_seed(0)), ratio)


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def outputs(model, x):
    args, kwargs = call_of(x, model)
    return pytree.tree_leaves(model(*args, **kwargs))


def of_other_sizes(x, model):
    """`x` twice as large along each axis in turn, where the model takes that; another batch size is always taken."""
    for axis in range(5):
        larger = pytree.tree_map_only(
            torch.Tensor, lambda t, axis=axis: torch.cat([t, t], axis) if axis < t.dim() else t, x
        )
        try:
            outputs(model, larger)
        except (RuntimeError, IndexError):
            assert axis > 0
        else:
            yield larger


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("name", channel_nets.ARCHITECTURES)
def test_cut_equals_masked(name, ratio):
    make, data = channel_nets.ARCHITECTURES[name]
    torch.manual_seed(0)
    net, x = randomise(make()), data()
    before = pickle.dumps(net.state_dict())
    walk = walk_of(net, x)
    cut = Cut(walk, chosen(walk, ratio))
    masked, small = cut.masked().eval(), cut.compact().eval()
    check_equal(cut, masked, small)
    with torch.no_grad():
        for each in (x, *(of_other_sizes(x, masked) if ratio == 0.5 and name not in ONE_SIZE else ())):
            for want, got in zip(outputs(masked, each), outputs(small, each)):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert pickle.dumps(net.state_dict()) == before  # the user's model is never touched
    if ratio == 0.5:
        assert count(small) <= SMALLER[name] * count(net), walk.labels.why_fixed


@pytest.mark.parametrize("name", channel_nets.ARCHITECTURES)
def test_smaller_model_trains_pickles_and_takes_another_batch_size(name):
    make, data = channel_nets.ARCHITECTURES[name]
    torch.manual_seed(0)
    x = data()
    small = prune(randomise(make()), x, 0.5)
    again = pickle.loads(pickle.dumps(small))
    small.train()
    larger = pytree.tree_map_only(torch.Tensor, lambda t: torch.cat([t, t, t]), x)
    found = [t for t in outputs(small, larger) if t.is_floating_point()]
    assert all(len(t) == 6 for t in found)
    sum(t.square().sum() for t in found).backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in small.parameters())
    assert count(again) == count(small)


def test_user_class_stays_where_its_code_has_no_sizes():
    make, data = channel_nets.ARCHITECTURES["unet"]
    assert type(prune(make(), data(), ratio=0.5)) is channel_nets.UNet
    make, data = channel_nets.ARCHITECTURES["vit"]
    assert (
        type(prune(make(), data(), ratio=0.5)) is not channel_nets.ViT
    )  # its heads are written into the code


@pytest.mark.parametrize("name", ["residual", "vit", "dense", "depthwise"])
def test_budgets(name):
    make, data = channel_nets.ARCHITECTURES[name]
    torch.manual_seed(0)
    net, x = randomise(make()), data()
    cost = macs(walk_of(net, x))
    small = sparsebit.prune(net, x, macs=0.5)
    assert 0.25 * cost(net) < cost(small) <= 0.5 * cost(net)
    small = sparsebit.prune(net, x, params=0.6)
    assert 0.4 * count(net) < count(small) <= 0.6 * count(net)


def test_round_to():
    make, data = channel_nets.ARCHITECTURES["plain"]
    small = sparsebit.prune(randomise(make()), data(), 0.4, round_to=4)
    kept = [m.out_channels for m in small.modules() if isinstance(m, torch.nn.Conv2d)]
    assert kept == [4, 8, 12]  # 5 of 8, 8 of 12 and 12 of 20 would stay: the nearest multiples


def test_a_budget_is_filled_where_layers_lose_much_at_once():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 32, 1), *(torch.nn.Conv2d(32, 32, 1) for _ in range(8))]
    net, x = torch.nn.Sequential(*layers), torch.randn(1, 3, 8, 8)
    cost = macs(walk_of(net, x))
    small = sparsebit.prune(net, x, macs=0.6, round_to=16)
    kept = {layer.out_channels for layer in small[:-1]}
    assert kept == {16, 32}  # all would lose 16 at the same ratio, and 0.25 of the MACs would be left
    assert 0.5 * cost(net) < cost(small) <= 0.6 * cost(net)


def test_dimensions_of_heads_from_the_top(tmp_path):
    make, data = channel_nets.ARCHITECTURES["vit"]
    torch.manual_seed(0)
    net, x = randomise(make()), data()
    small = sparsebit.prune(net, x, 0.5, heads="dimension", round_to=1)
    small.pruning_plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").apply(net, x)
    torch.testing.assert_close(again(x), small(x))
    attended = [n for n in small.graph.nodes if "scaled_dot_product" in n.name]
    (query,) = {tuple(shape_of(small, n.args[0], x))[1::2] for n in attended}
    assert query == (4, 3)  # all heads, half of the six dimensions of each


def shape_of(gm, node, x):
    class Seen(torch.fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if n is node:
                self.found = value.shape
            return value

    run = Seen(gm)
    run.run(x)
    return run.found


class PaddedShortcut(torch.nn.Module):
    """A stream of 16 channels becomes one of 32: eight zeros in front, eight behind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.inner, self.outer = torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.Conv2d(32, 32, 3, padding=1)
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 8, 8)) + self.outer(self.inner(x).relu())
        return self.head(x.relu().mean((2, 3)))


def test_whole_blocks_of_channels_may_vanish_from_a_stream():
    torch.manual_seed(0)
    net, x = randomise(PaddedShortcut()).eval(), torch.randn(2, 3, 8, 8)
    small = sparsebit.prune(net, x, 0.6, round_to=16)
    shapes = [tuple(m.weight.shape[:2]) for m in small.modules() if hasattr(m, "weight")]
    assert shapes == [
        (16, 3),
        (16, 16),
        (16, 16),
        (4, 16),
    ]  # the padded channels are gone, the 16 of the stem are not
    small(x).sum().backward()
    finer = sparsebit.prune(net, x, 0.6)  # without rounding some of both stay
    assert 0 < len(finer.head.weight[0]) - finer.stem.weight.shape[0] < 16


def test_the_smallest_filters_go():
    net = randomise(channel_nets.ARCHITECTURES["plain"][0]())
    first = net.body[0][0]
    with torch.no_grad():
        first.weight[[1, 4, 6]] *= 1e-3
    small = sparsebit.prune(net, channel_nets.image(), 0.375)
    kept = [i for i in range(8) if any(torch.equal(first.weight[i], w) for w in small.body[0][0].weight)]
    assert kept == [0, 2, 3, 5, 7]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ratio": 1.0}, "ratio: must be at least 0 and below 1"),
        ({"ratio": 0.5, "macs": 0.5}, "one of ratio, macs, params and latency"),
        ({"macs": 0.0001}, "cannot be reached"),
        ({"params": 1.5}, "params: must be above 0"),
        ({"round_to": 0}, "round_to: must be at least 1, a whole number, got 0"),
    ],
)
def test_bad_input(options, message):
    make, data = channel_nets.ARCHITECTURES["plain"]
    with pytest.raises(ConfigError, match=message):
        sparsebit.prune(make(), data(), **options)


@torch.no_grad()
def test_a_model_in_training_is_cut_as_it_is():
    """Running the example in training would move the statistics of its batch norms."""
    make, data = channel_nets.ARCHITECTURES["residual"]
    torch.manual_seed(0)
    net, x = randomise(make()), data()
    want = prune(net.eval(), x, 0.5).state_dict()
    small = prune(net.train(), x, 0.5)
    assert small.training and any("running_mean" in name for name in want)
    for name, value in small.state_dict().items():
        assert torch.equal(value, want[name]), name
