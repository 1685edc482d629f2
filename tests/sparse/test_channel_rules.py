"""Single channel rules: what they prove, what they keep and why, and what a wrong one is told."""

from __future__ import annotations

import channel_nets
import pytest
import sequence_nets
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_nets import STEPS, Random
from torch import nn

import sparsebit
from models import randomise
from sparsebit.errors import SparsebitError
from sparsebit.sparse import SparseModel
from sparsebit.sparse.choose.allocate import uniform
from sparsebit.sparse.cut.surgery import Cut, check_equal
from sparsebit.sparse.labels.rules import CHANNEL_RULES, pointwise
from sparsebit.sparse.labels.walk import walk_of
from sparsebit.sparse.trace.attention import OPEN, OpenAttention


def halved(net, x, ratio=0.5, seed=0, heads="whole"):
    """The walk, and the model that is left, compared with the masked one."""
    walk = walk_of(net.eval(), x, heads)
    worth = torch.rand(len(walk.labels), generator=torch.Generator().manual_seed(seed))
    cut = Cut(walk, uniform(walk, worth, ratio))
    small = cut.compact()
    check_equal(cut, cut.masked(), small)
    return walk, small


class Between(nn.Module):
    """conv, something, conv."""

    def __init__(self, act, out=4, middle=8):
        super().__init__()
        self.a, self.act, self.b = nn.Conv2d(3, 8, 1), act, nn.Conv2d(middle, out, 1)

    def forward(self, x):
        return self.b(self.act(self.a(x)))


def between(act, middle=8):
    return halved(Between(act, middle=middle), channel_nets.image())


# -- what is kept, and why ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "act, middle, reason",
    [
        (lambda x: x.softmax(1), 8, "softmax"),
        (lambda x: x.argmax(1, keepdim=True).float(), 1, "argmax"),
        (lambda x: x.max(1, keepdim=True)[1].float(), 1, "max"),
        (lambda x: x.mean().expand(2, 1, 16, 16), 1, "mean"),
        (lambda x: x.sigmoid().sum(1, keepdim=True), 1, "sum"),  # not zero where the channel was
        (lambda x: torch.einsum("bchw,bcij->bhwij", x.cos(), x.cos()).flatten(3)[:, None, 0], 1, "einsum"),
        (lambda x: x[:, 2:3] * 2 + x[:, [4]], 1, "takes a single position"),
        (lambda x: x.roll(1, 1), 8, "roll"),
        (lambda x: F.normalize(x.exp(), 2.0, 1), 8, "normalize"),
        (lambda x: x.cumsum(1), 8, "cumsum"),
        (lambda x: F.local_response_norm(x, 3), 8, "local_response_norm"),
    ],
)
def test_kept_with_a_reason(act, middle, reason):
    walk, small = between(act, middle)
    assert small.a.out_channels == 8
    assert any(reason in why for why in walk.labels.why_fixed.values()), set(walk.labels.why_fixed.values())


@pytest.mark.parametrize(
    "act, middle",
    [
        (lambda x: x.relu().sum(1, keepdim=True), 1),  # nothing is added where the channel was
        (lambda x: x.mean(1, keepdim=True), 1),  # of the channels that are left
        (lambda x: x.sigmoid().mean((1, 2), keepdim=True).expand(-1, -1, 16, -1), 1),
        (lambda x: torch.linalg.vector_norm(x, dim=-3, keepdim=True), 1),
        (lambda x: torch.std(x, dim=1, correction=0, keepdim=True), 1),
        (lambda x: x.max(1).values[:, None] + x.amin(1, True) + x.logsumexp(1, True), 1),
        (lambda x: F.normalize(x, dim=1), 8),
        (lambda x: F.softmax(x.flatten(2), -1).view(2, 8, 16, 16), 8),
        (lambda x: x.flip(1), 8),
        (lambda x: torch.max(x, 2, keepdim=True)[0] + x, 8),
        (lambda x: F.interpolate(F.avg_pool2d(x, 2), size=x.shape[-2:], mode="bilinear"), 8),
        (lambda x: x * x.shape[1] ** -0.5, 8),  # the factor stays what it was
        (lambda x: torch.where(x > 0, x, 0.1 * x), 8),
        (lambda x: torch.stack([x, x.abs()], 1).amax(1), 8),
        (lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2), 8),
        (lambda x: x.tensor_split(2, dim=1)[1].relu(), 4),
        (lambda x: torch.einsum("bchw,bcij->bhwij", x, x).flatten(3).permute(0, 3, 1, 2)[:, :8], 8),
    ],
)
def test_cut(act, middle):
    walk, small = between(act, middle)
    assert small.a.out_channels < 8, walk.labels.why_fixed


class Bounded(nn.Module):
    """A bound for every channel, a parameter or computed."""

    def __init__(self, act):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(3, 8, 1)
        self.low, self.high = nn.Parameter(-torch.rand(8, 1, 1)), nn.Parameter(torch.rand(1, 8, 1, 1))
        self.act = act

    def forward(self, x):
        return self.b(self.act(self, self.a(x), x))


@pytest.mark.parametrize(
    "act",
    [
        lambda m, y, x: torch.clamp(y, max=m.high),
        lambda m, y, x: torch.clip(y, m.low, m.high),
        lambda m, y, x: y.clamp(min=m.low),
        lambda m, y, x: y.clamp_(m.low, m.high),
        lambda m, y, x: torch.clamp_max(y.clamp_min(m.low), m.high),
        lambda m, y, x: y.clamp(max=m.c(x)),
        lambda m, y, x: torch.fmin(y, m.high),
    ],
)
def test_bounds_follow_the_channels(act):
    walk, small = halved(Bounded(act), channel_nets.image())
    assert small.a.out_channels == 4, walk.labels.why_fixed


@pytest.mark.parametrize(
    "act",
    [
        lambda m, y, x: y / m.high,
        lambda m, y, x: (y - m.low) / (m.high.sqrt()),
        lambda m, y, x: y + torch.sin(m.high * y) ** 2 / m.high,  # snake
        lambda m, y, x: y * m.high.rsqrt() + torch.log(m.high),
        lambda m, y, x: torch.addcdiv(y, m.low, m.high),
        lambda m, y, x: torch.div(input=y, other=m.high),
        lambda m, y, x: y * m.high.sqrt() + torch.hypot(y, m.high),
        lambda m, y, x: (y * y + m.high * m.high).sqrt(),
        lambda m, y, x: y / (y.abs() + m.high),
        lambda m, y, x: y / (F.relu(y) + m.high * m.low.abs()),
        lambda m, y, x: (torch.sigmoid(y) * m.high).log(),
        lambda m, y, x: y / (m.high * y.mean((0, 2, 3), keepdim=True).abs().exp()),
        lambda m, y, x: y / (y.exp() * m.high).view(y.shape),
        lambda m, y, x: y / m.high**0.5 + torch.pow(m.high, exponent=-1),
    ],
)
def test_what_is_divided_by_goes_with_the_channels(act):
    net, x = Bounded(act), channel_nets.image()
    walk, small = halved(net, x)
    assert small.a.out_channels == 4, walk.labels.why_fixed
    smodel = SparseModel(net, {"SPARSER": {"RATIO": 0.5}}, x)
    smodel.calc_params()
    assert smodel(x).isfinite().all()  # where channels go, nothing is divided by zero
    torch.testing.assert_close(smodel.compact()(x), smodel(x))
    smodel.train()(x).square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in smodel.parameters())


def test_squares_do_not_unmask_what_is_added_to_the_channels():
    """A norm by hand divides by a mean over the channels, which is not a zero where one of them goes."""

    def norm(m, y, x):
        y = y + m.high
        return y / (y**2).mean(1, keepdim=True).add(1e-6).sqrt()

    model = SparseModel(Bounded(norm), {"SPARSER": {"RATIO": 0.5}}, channel_nets.image())
    assert "high" not in model.walk().divisors


def test_weights_that_are_computed_step_by_step_take_no_longer_than_their_graph():
    class Sinkhorn(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.o, self.w = nn.Linear(8, 16), nn.Linear(16, 3), nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            w = self.w
            for _ in range(20):  # 2 to the power of 40 paths
                w = w - w.logsumexp(0, keepdim=True)
                w = w - w.logsumexp(1, keepdim=True)
            return self.o(F.relu(self.a(x)) @ w.exp())

    x = torch.randn(4, 8)
    assert sparsebit.prune(Sinkhorn(), x, 0.5)(x).shape == (4, 3)


def test_a_divisor_is_not_taken_for_zero():
    """What it is added to has no zeros where channels go: no sum may run over them."""
    walk, small = halved(
        Bounded(lambda m, y, x: y / m.high + (y + m.high).sum(1, keepdim=True)), channel_nets.image()
    )
    assert small.a.out_channels == 8 and any("sum" in why for why in walk.labels.why_fixed.values())


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Between(nn.ReLU())
        nn.utils.parametrize.register_parametrization(self.net.b, "weight", nn.Tanh())

    def forward(self, x):
        return self.net(x)


def test_computed_weights_are_kept():
    walk, small = halved(Parametrized(), channel_nets.image())
    assert small.net.a.out_channels == 8 and walk.labels.why_fixed


# -- recurrent layers and attention ------------------------------------------------------------------------
def test_hidden_size_follows():
    _, small = halved(
        sequence_nets.Recurrent(nn.LSTM, num_layers=2, bidirectional=True), channel_nets.words()
    )
    assert (small.rnn.input_size, small.rnn.hidden_size, small.fc.in_features) == (4, 6, 12)
    assert small.rnn.weight_ih_l1_reverse.shape == (4 * 6, 12) and small.rnn.weight_hh_l0.shape == (24, 6)
    assert all(a is b for a, b in zip(small.rnn._flat_weights, small.rnn.parameters()))


def test_state_given_by_the_user_fixes_the_hidden_size():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x, h):
            return self.fc(self.rnn(x, h)[0])

    _, small = halved(Stateful(), (torch.randn(2, 5, 4), torch.randn(1, 2, 8)))
    assert small.rnn.hidden_size == 8


def test_whole_heads_go():
    _, small = halved(sequence_nets.TorchAttention(True), channel_nets.words())
    assert small.attn.q_proj.weight.shape == (8, 8)  # two of four heads of four, eight of sixteen channels
    assert small.attn.out_proj.weight.shape == (8, 8)


def test_head_bias_table_follows_the_heads():
    _, small = halved(sequence_nets.FusedQKV(), channel_nets.image())
    assert small.table.shape == (31, 2)


@pytest.mark.parametrize("fused", [True, False])
def test_dimensions_of_a_single_head_go(fused):
    _, small = halved(sequence_nets.OneHead(fused), channel_nets.words())
    assert (small.q.out_features, small.k.out_features, small.v.out_features) == (4, 4, 8)


class GroupedQueries(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(6, 24), nn.Linear(6, 24), nn.Linear(24, 3)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (8, 3)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 4, 3)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def test_heads_that_share_a_key_go_together():
    _, small = halved(GroupedQueries(), torch.randn(2, 5, 6))
    assert (small.q.out_features, small.kv.out_features, small.out.in_features) == (12, 12, 12)


def test_a_dimension_of_every_head_goes():
    _, small = halved(GroupedQueries(), torch.randn(2, 5, 6), 0.34, heads="dimension")
    assert (small.q.out_features, small.kv.out_features, small.out.in_features) == (
        16,
        16,
        16,
    )  # two of three


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("name", channel_nets.ARCHITECTURES)
def test_dimensions_of_heads_go_everywhere(name, ratio):
    make, data = channel_nets.ARCHITECTURES[name]
    torch.manual_seed(0)
    net = randomise(make())
    _, small = halved(net, data(), ratio, heads="dimension")
    count = lambda m: sum(p.numel() for p in m.parameters())
    assert count(small) < 0.9 * count(net)


class Distances(nn.Module):
    """Attention by distance: no rule knows what that does to query and key."""

    def __init__(self, heads, dim):
        super().__init__()
        self.shape, self.q, self.v, self.o = (heads, dim), *(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        q, v = (layer(x).unflatten(-1, self.shape).transpose(1, 2) for layer in (self.q, self.v))
        return self.o((torch.cdist(q, q).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("heads", ["whole", "dimension"])
@pytest.mark.parametrize("shape", [(8, 2), (4, 4), (2, 8), (16, 1)])
def test_values_keep_the_heads_that_their_weights_keep(shape, heads):
    walk, small = halved(Distances(*shape), torch.randn(2, 5, 16), heads=heads)
    assert small.q.out_features == 16 and any("cdist" in why for why in walk.labels.why_fixed.values())
    assert small.v.out_features == (
        8 if shape[1] > 1 else 16
    )  # half the dimensions of every head, if it has some


class Positions(nn.Module):
    """A residual stream with a table of positions that is longer than it is wide."""

    def __init__(self, shape, kind):
        super().__init__()
        table = torch.randn(shape)
        if kind == "learned":
            self.pos = nn.Parameter(table)
        else:
            self.register_buffer("pos", table)
        self.e, self.up, self.down, self.out = (
            nn.Embedding(9, 8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        rows = self.pos[:, : x.size(1)] if len(self.pos) == 1 else self.pos[: x.size(1)].transpose(0, 1)
        h = self.e(x) + rows
        return self.out(h + self.down(self.up(h).relu()))


@pytest.mark.parametrize("heads", ["whole", "dimension"])
@pytest.mark.parametrize("shape, kind", [((1, 40, 8), "learned"), ((40, 1, 8), "computed")])
def test_a_table_longer_than_the_example_does_not_block_the_stream(shape, kind, heads):
    walk, small = halved(Positions(shape, kind), torch.randint(9, (2, 5)), heads=heads)
    assert small.e.embedding_dim == 4 and small.pos.shape == (*shape[:2], 4), walk.labels.why_fixed
    assert small(torch.randint(9, (3, 40))).shape == (3, 40, 3)


def test_tied_embedding_is_cut_once():
    _, small = halved(sequence_nets.Rotary(), channel_nets.words())
    assert small.head.weight is small.embed.weight and small.embed.weight.shape == (20, 8)


@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bias": False}, {"kdim": 6, "vdim": 10}])
def test_open_attention_computes_the_same(options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, **options).eval()
    ours = OpenAttention(theirs).eval()
    q, k, v = torch.randn(3, 3, 8), torch.randn(3, 3, theirs.kdim), torch.randn(3, 3, theirs.vdim)
    added, ignored = torch.randn(3, 3), torch.tensor([[False, True, False]] * 3)
    for masks in (
        {},
        {"attn_mask": added},
        {"key_padding_mask": ignored, "average_attn_weights": False},
        {"attn_mask": torch.randn(6, 3, 3), "key_padding_mask": ignored.float()},
        {"attn_mask": torch.tensor([[False, True, True]] * 3)},
    ):
        for want, got in zip(theirs(q, k, v, **masks), ours(q, k, v, **masks)):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_open_layers_compute_the_same(kind, norm_first):
    torch.manual_seed(0)
    theirs = kind(8, 2, 12, norm_first=norm_first).eval()
    x = [torch.randn(5, 3, 8) for _ in range(1 + ("Decoder" in kind.__name__))]
    want = theirs(*x)
    theirs.self_attn = OpenAttention(theirs.self_attn)
    if len(x) > 1:
        theirs.multihead_attn = OpenAttention(theirs.multihead_attn)
    torch.testing.assert_close(OPEN[kind](theirs).eval()(*x), want)


# -- a rule that is wrong ----------------------------------------------------------------------------------
def wrong_rule(found):
    def swap_channels(walk, node, input, *args, **kwargs):
        return found(input)

    return swap_channels


@pytest.mark.parametrize(
    "found, message",
    [
        (lambda labels: torch.zeros_like(labels), "after pruning, where"),
        (lambda labels: labels.flip(1), "differs from the masked one"),
    ],
)
def test_an_error_names_the_node_and_the_rule(found, message, monkeypatch):
    monkeypatch.setitem(CHANNEL_RULES._items, nn.Softplus, wrong_rule(found))
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Softplus(), nn.Conv2d(8, 4, 1))
    with pytest.raises(SparsebitError, match=message) as error:
        halved(net, channel_nets.image())
    assert str(error.value).startswith("1: ") and "test_channel_rules.swap_channels" in str(error.value)


def test_an_op_that_cannot_run_names_the_node_and_the_rule(monkeypatch):
    monkeypatch.setitem(CHANNEL_RULES._items, F.local_response_norm, pointwise.unary)
    monkeypatch.setitem(CHANNEL_RULES._items, nn.Bilinear, lambda w, n, a, b: a)
    net = nn.ModuleDict({"a": nn.Linear(3, 8), "b": nn.Bilinear(8, 8, 8), "c": nn.Linear(8, 2)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            y = self.net["a"](x)
            return self.net["c"](self.net["b"](y, y))

    with pytest.raises(SparsebitError, match=r"^net\.b: does not run on the pruned shapes.*<lambda>"):
        halved(Net(), torch.randn(2, 3))


# -- random networks ---------------------------------------------------------------------------------------
step = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9), st.integers(2, 5))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(step, min_size=3, max_size=9), st.sampled_from([0.3, 0.5, 0.9]), st.integers(0, 3))
def test_random_networks(steps, ratio, seed):
    torch.manual_seed(seed)
    net, x = randomise(Random([("conv", 0, 0, 4), *steps])), torch.randn(2, 3, 4, 4)
    walk, small = halved(net, x, ratio, seed)
    assert not walk.gm.meta["islands"]
    small(torch.cat([x, x])).square().sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in small.parameters())
