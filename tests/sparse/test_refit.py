"""Layers that read less are fitted to the whole model, where the gradient is gone; others get their mean right."""

from __future__ import annotations

import copy

import channel_nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import sparsebit
from models import randomise
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.sparse import SparseModel
from sparsebit.sparse.depth.merge_blocks import merge
from sparsebit.sparse.mend import layerwise, least_squares
from sparsebit.sparse.mend.batch_norm import reestimate
from sparsebit.sparse.trace.front_end import call_of


class Block(nn.Module):
    """As in torchvision: += and a ReLU that writes into its input."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


class Residual(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.blocks = nn.Sequential(*[Block(8) for _ in range(blocks)])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def masked(model, x, ratio=0.5, stream=False, **sparser):
    smodel = SparseModel(
        model, {"DEVICE": "cpu", "SPARSER": {"STRATEGY": "l2norm", "RATIO": ratio, **sparser}}, x
    )
    if not stream:
        smodel.disable_sparse_before_add()
    smodel.calc_params()
    return smodel


def smooth(*shape):
    """Neighbouring values that have to do with each other, as in images."""
    x = torch.randn(*shape)
    return x + x.roll(1, -1) + x.roll(2, -1)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (lambda: nn.Linear(8, 3), ()),
        (lambda: nn.Linear(8, 3, bias=False), (5,)),
        (lambda: nn.Conv1d(8, 3, 3, stride=2, padding=2, dilation=2), (15,)),
        (lambda: nn.Conv2d(8, 3, 3, padding="same", bias=False), (9, 7)),
        (lambda: nn.Conv2d(8, 3, (3, 1), stride=(2, 1), padding=(1, 0), padding_mode="reflect"), (9, 7)),
        (lambda: nn.Conv2d(8, 3, 3, padding=(2, 1), padding_mode="circular"), (9, 7)),
        (lambda: nn.Conv3d(8, 3, (1, 2, 3), stride=(1, 1, 2)), (3, 5, 7)),
    ],
)
def test_the_gradient_is_gone(layer, shape, monkeypatch):
    monkeypatch.setattr(layerwise, "ROWS", 10**6)  # all positions
    monkeypatch.setattr(least_squares, "DAMPING", (1e-4,))
    torch.manual_seed(0)
    second = layer()
    first = nn.Linear(6, 8) if isinstance(second, nn.Linear) else type(second)(6, 8, 1)
    model = nn.Sequential(first, nn.ReLU(), second)
    x = smooth(256, *shape, 6) if isinstance(second, nn.Linear) else smooth(256, 6, *shape)
    smodel = masked(model, x[:2])

    def gradient(net):
        net.zero_grad()
        loss = F.mse_loss(net(x), model(x).detach())
        loss.backward()
        return loss.item(), max(p.grad.abs().max().item() for p in net[2].parameters())

    (worse, steep), (better, flat) = (
        gradient(smodel.compact()),
        gradient(smodel.refit(list(x.split(32))).compact()),
    )
    assert better < 0.9 * worse
    assert flat < 0.003 * steep  # there is some damping


def test_a_residual_stream_is_put_right_and_norms_fit_the_data():
    torch.manual_seed(0)
    model, x = randomise(Residual()).eval(), smooth(256, 3, 8, 8)
    before = copy.deepcopy(model.state_dict())
    smodel = masked(model, x[:1])
    plain = smodel.compact()
    small = smodel.refit(list(x.split(32))).compact()
    behind = lambda net, i: net.blocks[: i + 1](net.stem(x)).detach()
    error = lambda net, i: float((behind(net, i) - behind(model, i)).square().mean())
    for i in range(2):
        assert error(small, i) < 0.5 * error(plain, i)
    norm, seen = small.blocks[1].bn2, []
    norm.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    small(x)
    torch.testing.assert_close(norm.running_mean, seen[0].mean((0, 2, 3)), rtol=0.1, atol=0.05)
    torch.testing.assert_close(norm.running_var, seen[0].var((0, 2, 3)), rtol=0.1, atol=0.02)
    assert torch.equal(small.head.weight, model.head.weight)  # it reads as much as before
    torch.testing.assert_close(small(x).mean(0), model(x).mean(0), rtol=1e-3, atol=1e-4)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())


def test_the_layer_in_front_of_an_addition_is_fitted_to_the_sum():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
            self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x):
            x = x + self.b(torch.relu(self.a(x)))
            return x + self.d(torch.relu(self.c(x)))

    torch.manual_seed(0)
    model, x = Two(), smooth(512, 6)
    smodel = masked(model, x)
    smodel.refit([x])
    small = smodel.compact()
    middle = (x + small.b(torch.relu(small.a(x)))).detach()
    kept = torch.relu(small.c(middle)).detach()
    ones = torch.ones(len(x), 1)
    want = torch.linalg.lstsq(torch.cat([kept, ones], 1), (model(x) - middle).detach()).solution.T
    torch.testing.assert_close(small.d.weight.detach(), want[:, :-1], rtol=0.02, atol=0.005)
    torch.testing.assert_close(small.d.bias.detach(), want[:, -1], rtol=0.02, atol=0.005)


@pytest.mark.parametrize("room", [0, 60_000])
def test_without_room_batches_start_again_and_nothing_else_changes(monkeypatch, room):
    torch.manual_seed(0)
    model, x = randomise(Residual(3)).eval(), smooth(64, 3, 8, 8)
    batches = list(x.split(16))
    whole = masked(model, x[:1]).refit(batches).compact()
    monkeypatch.setattr(layerwise, "ROOM", room)
    runs = []
    monkeypatch.setattr(layerwise._Paused, "start", _counted(layerwise._Paused.start, runs))
    again = masked(model, x[:1]).refit(batches).compact()
    assert len(runs) > 2 * len(batches)
    for (name, a), b in zip(whole.state_dict().items(), again.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


def _counted(function, runs):
    def counted(*args):
        runs.append(1)
        return function(*args)

    return counted


@pytest.mark.parametrize("name", channel_nets.ARCHITECTURES)
def test_every_architecture_comes_closer(name):
    make, data = channel_nets.ARCHITECTURES[name]
    torch.manual_seed(0)
    model, example = randomise(make()).eval(), data()
    batches, others = ([pytree.tree_map(another, example) for _ in range(n)] for n in (32, 8))
    reestimate(model, (call_of(batch, model) for batch in batches))
    smodel = masked(model, example, 0.3, stream=True)

    def error(net):
        return sum(float((flat(net, x) - flat(model, x)).square().sum()) for x in others)

    with torch.no_grad():
        before = error(smodel)
        smodel.refit(batches)
        after = error(smodel)
        for batch in others[:1]:
            want = flat(smodel, batch)
            torch.testing.assert_close(flat(smodel.compact(), batch), want, rtol=1e-3, atol=1e-4)
    assert after < before


def another(value):
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.randn_like(value)
    return torch.randint_like(value, 20) if value.max() > 1 else value


def flat(net, batch):
    args, kwargs = call_of(batch, net)
    found = pytree.tree_leaves(net(*args, **kwargs))
    return torch.cat([v.double().flatten() for v in found if isinstance(v, torch.Tensor)])


def test_merged_blocks_are_fitted_to_the_model_before():
    torch.manual_seed(0)
    model, x = randomise(Residual(3)).eval(), smooth(128, 3, 8, 8)
    batches = list(x.split(32))
    merged = merge(model, x[:1], ["blocks.0"], batches)
    smodel = masked(merged, x[:1])
    error = lambda net: float((net(x) - model(x)).detach().square().mean())
    near = error(copy.deepcopy(smodel).refit(batches).compact())
    assert error(smodel.refit(batches, model).compact()) < near < error(masked(merged, x[:1]).compact())


def test_what_is_left_alone():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.twice, self.tied = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4)
            self.other.weight = self.one.weight
            self.wide = nn.Linear(8, 4)

        def forward(self, x):
            x = torch.relu(self.a(x))
            x = self.twice(torch.relu(self.twice(x)))
            pooled = self.wide(x).mean(0, keepdim=True)
            return self.one(x) + self.other(x), self.wide(x[:1]) + self.one(x), pooled

    torch.manual_seed(0)
    model, x = Odd(), smooth(64, 6)
    smodel = masked(model, x[:2], stream=True)
    before = {k: v.clone() for k, v in smodel.state_dict().items()}
    smodel.refit([x])
    assert all(torch.equal(v, before[k]) for k, v in smodel.state_dict().items())


def test_what_does_not_hold_for_other_samples_is_not_fitted():
    torch.manual_seed(0)
    model, others = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4)), smooth(500, 6)
    smodel = masked(model, others[:2])
    before = smodel.compact()
    one = copy.deepcopy(smodel).refit([smooth(1, 6)]).compact()
    assert torch.equal(one[2].weight, before[2].weight)  # nothing to try it on
    for count in (8, 16, 32, 64):
        few = copy.deepcopy(smodel).refit([smooth(count, 6)]).compact()
        assert error_of(few, model, others) < 1.1 * error_of(before, model, others)
    assert error_of(few, model, others) < 0.2 * error_of(before, model, others)


def test_filters_that_are_too_large_get_their_mean_right(monkeypatch):
    monkeypatch.setattr(layerwise, "LARGEST", 15)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)), smooth(400, 6)
    smodel = masked(model, x[:2])
    before = smodel.compact()[2].weight.clone()
    small = smodel.refit([x]).compact()
    assert torch.equal(small[2].weight, before)
    torch.testing.assert_close(small(x).mean(0), model(x).mean(0), rtol=1e-3, atol=1e-4)


def test_half_precision_and_training_flags():
    torch.manual_seed(0)
    model, x = randomise(Residual()).bfloat16().train(), smooth(64, 3, 8, 8).bfloat16()
    smodel = masked(model, x[:1])
    smodel.refit([x])
    assert all(module.training for module in smodel.modules())
    small = smodel.compact().eval()
    assert small(x).dtype == torch.bfloat16 and torch.isfinite(small(x).float()).all()


def test_refusals():
    x = smooth(64, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(ConfigError, match="TYPE is unstructured"):
        masked(model, x, TYPE="unstructured").refit([x])
    with pytest.raises(ConfigError, match="not a generator"):
        masked(model, x).refit(b for b in [x])
    with pytest.raises(ConfigError, match="needs an example"):
        SparseModel(model, {"DEVICE": "cpu"}).refit([x])
    with pytest.raises(CalibrationError, match="empty"):
        masked(model, x).refit([])


# -- what a review found ---------------------------------------------------------------------------------
def error_of(net, model, x):
    with torch.no_grad():
        return float((net(x) - model(x)).square().mean() / model(x).square().mean())


def test_a_model_that_holds_a_model_takes_labelled_batches():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x):
            return self.model(x)

    torch.manual_seed(0)
    model, x = Holds(), smooth(256, 6)
    small = sparsebit.prune(model, x[:2], ratio=0.5, batches=[(x, torch.zeros(256).long())])
    assert error_of(small, model, x) < 0.5 * error_of(sparsebit.prune(model, x[:2], ratio=0.5), model, x)


def test_single_weights_take_batches_too():
    x = smooth(64, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured"}}
    small = sparsebit.prune(model, x, ratio=0.5, batches=[x], config=config)
    assert int((small[0].weight == 0).sum()) == 24


def test_memory_does_not_grow_with_the_number_of_batches(monkeypatch):
    torch.manual_seed(0)
    model, x = randomise(Residual(3)).eval(), smooth(16, 3, 8, 8)
    monkeypatch.setattr(layerwise, "ROOM", 100_000)
    alive, most = {}, []
    until, forget = layerwise._Paused.until, layerwise._Paused.forget

    def run(self, *args, **options):
        until(self, *args, **options)
        alive[id(self)] = self.size() + sum(v.nbytes for v in self.inputs.values())
        most.append(sum(alive.values()))

    def drop(self):
        forget(self)
        alive.pop(id(self), None)

    monkeypatch.setattr(layerwise._Paused, "until", run)
    monkeypatch.setattr(layerwise._Paused, "forget", drop)
    peaks = []
    for count in (4, 32):
        most.clear()
        masked(model, x[:1]).refit([x] * count)
        peaks.append(max(most))
        alive.clear()
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize("seed", range(4))
def test_constant_inputs_give_no_wild_weights(seed):
    torch.manual_seed(seed)
    conv = lambda i, o: nn.Conv2d(i, o, 3)
    model = nn.Sequential(conv(3, 16), nn.ReLU(), conv(16, 16), nn.ReLU(), conv(16, 4))
    batches = [torch.full((16, 3, 12, 12), 0.3)] * 4
    small = sparsebit.prune(model, batches[0][:1], macs=0.5, batches=batches)
    assert max(float(p.abs().max()) for p in small.parameters()) < 10
    other = smooth(8, 3, 12, 12)
    assert error_of(small, model, other) < 2 * error_of(
        sparsebit.prune(model, batches[0][:1], macs=0.5), model, other
    )


@pytest.mark.parametrize("tokens", [5, 8])
def test_a_norm_over_tokens_is_no_norm_over_features(tokens):
    torch.manual_seed(0)
    a, b, c = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 4)
    model = nn.Sequential(a, nn.ReLU(), b, nn.BatchNorm1d(tokens), nn.ReLU(), c)
    for _ in range(20):
        model(smooth(64, tokens, 6))
    model.eval()
    x = smooth(256, tokens, 6)
    before = masked(model, x[:2]).compact()
    small = masked(model, x[:2]).refit(list(x.split(64))).compact()
    assert error_of(small, model, x) < error_of(before, model, x)


def test_values_that_are_not_finite_and_filters_of_zeros():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 8)

        def forward(self, x, mask):
            return self.b(torch.relu(self.a(x))) + mask

    torch.manual_seed(0)
    x, mask = smooth(64, 6), torch.zeros(64, 8).masked_fill(torch.rand(64, 8) < 0.3, -torch.inf)
    small = sparsebit.prune(Masked(), (x, mask), ratio=0.5, batches=[(x, mask)] * 4)
    assert all(p.isfinite().all() for p in small.parameters())

    conv = lambda i, o: [nn.Conv2d(i, o, 3, 1, 1), nn.BatchNorm2d(o), nn.ReLU()]
    model = nn.Sequential(*conv(3, 8), *conv(8, 8), nn.Conv2d(8, 4, 3)).eval()
    nn.init.zeros_(model[3].weight)
    images = smooth(16, 3, 8, 8)
    small = sparsebit.prune(model, images[:1], ratio=0.5, batches=[images] * 4)
    assert all(p.isfinite().all() for p in small.parameters())
    small = sparsebit.prune(model, images[:1], ratio=0.5, batches=[images[:0], images])
    assert all(p.isfinite().all() for p in small.parameters())


def test_islands_that_keep_something():
    class Keep(nn.Module):
        def forward(self, x):
            if x.sum() > 1e9:  # cannot be traced
                return x
            self.kept = x.clone()
            return x

    class Give(nn.Module):
        def __init__(self, keeper):
            super().__init__()
            object.__setattr__(self, "keeper", [keeper])

        def forward(self, x):
            with torch.enable_grad():
                return x if x.sum() > 1e9 else x + self.keeper[0].kept * self.scale

        scale = 1.0

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.keep = Keep()
            self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 4)
            self.give = Give(self.keep)

        def forward(self, x):
            x = self.keep(x)
            return self.c(self.give(self.b(torch.relu(self.a(x)))))

    torch.manual_seed(0)
    model, x = Net(), smooth(400, 6)
    batches = [x[:250], x[250:350], x[350:]]
    before, after = masked(copy.deepcopy(model), x[:2]), masked(model, x[:2]).refit(batches)
    assert error_of(after, model, x) < 0.5 * error_of(before, model, x)


def test_shared_biases_and_a_sum_of_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8))
    model[4].bias = model[2].bias
    x = smooth(256, 6)
    smodel = masked(model, x[:2])
    before = smodel.compact()[2].bias.clone()
    assert torch.equal(smodel.refit([x]).compact()[2].bias, before)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)

        def forward(self, x):
            z = self.b(torch.relu(self.a(x)))
            return z + z

    model = Twice()
    before, after = (masked(copy.deepcopy(model), x[:2], stream=True) for _ in range(2))
    assert error_of(after.refit([x]), model, x) < 0.5 * error_of(before, model, x)


def test_one_tensor_is_one_batch():
    torch.manual_seed(0)
    conv = lambda i, o: nn.Conv2d(i, o, 3, 1, 1)
    model, x = nn.Sequential(conv(3, 64), nn.ReLU(), conv(64, 8)), smooth(256, 3, 8, 8)
    one, other = (masked(model, x[:1]).refit(batches).compact()[2].weight for batches in (x, [x]))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(one, masked(model, x[:1]).compact()[2].weight)
