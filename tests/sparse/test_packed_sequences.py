"""Packed sequences: text and speech models whose recurrent layers skip the padding are pruned like the others."""

from __future__ import annotations

import functools
import io

import pytest
import torch
import torch.nn.utils.rnn as renamed
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
)
from torch.utils.flop_counter import FlopCounterMode

import sparsebit
from sparsebit.errors import TraceError
from sparsebit.sparse import SparseModel
from sparsebit.sparse.cut.surgery import Cut
from sparsebit.sparse.labels.walk import walk_of
from sparsebit.sparse.plan import compact_with_plan

LENGTHS = torch.tensor([3, 5, 2])


def batch(n=3, t=5, generator=1):
    g = torch.Generator().manual_seed(generator)
    return torch.randn(n, t, 6, generator=g), torch.randint(1, t + 1, (n,), generator=g)


class Classifier(nn.Module):
    """A projection, an LSTM over packed sequences, a classifier over the mean of what it gives."""

    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.a, self.rnn = nn.Linear(6, 16), kind(16, 12, batch_first=True, **options)
        width = (getattr(self.rnn, "proj_size", 0) or 12) * (2 if self.rnn.bidirectional else 1)
        self.fc = nn.Linear(width, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.a(x), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        out, _ = self.rnn(packed)
        out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return self.fc(out.mean(1))


def pruned(model, example, ratio=0.5):
    """The masked model and the compact one, which compute the same on sequences of other lengths."""
    smodel = SparseModel(model.eval(), {"SPARSER": {"RATIO": ratio}}, example).eval()
    assert not smodel.model.meta["islands"], smodel.model.meta["islands"]
    smodel.calc_params()
    return smodel, smodel.compact()


def assert_same(smodel, small, *inputs):
    torch.testing.assert_close(small(*inputs), smodel(*inputs), rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def _alone():
    """Tiny kernels: two threads would mostly wait for each other."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Written(Classifier):
    """`forward` is a function, for short."""

    def __init__(self, forward, *args, **options):
        super().__init__(*args, **options)
        self.written, self.pack = forward, functools.partial(pack_padded_sequence, batch_first=True)

    def forward(self, *inputs):
        return self.written(self, *inputs)


EXAMPLE = torch.randn(3, 5, 6), LENGTHS
OTHER = torch.randn(4, 7, 6), torch.tensor([2, 7, 1, 7])


# -- a classifier, end to end --------------------------------------------------------------------------------
def test_the_hidden_size_is_cut():
    smodel, small = pruned(Classifier(), (torch.randn(3, 5, 6), LENGTHS))
    assert (small.rnn.input_size, small.rnn.hidden_size, small.fc.in_features) == (8, 6, 6)
    assert type(small) is Classifier
    assert_same(smodel, small, torch.randn(4, 7, 6), torch.tensor([2, 7, 1, 7]))
    small.train()(*batch()).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in small.parameters())


def test_a_plan_makes_it_again(tmp_path):
    model = Classifier().eval()
    small = sparsebit.prune(model, (torch.randn(3, 5, 6), LENGTHS), 0.5).eval()
    small.pruning_plan.save(tmp_path / "plan.json")
    again = sparsebit.sparse.Plan.load(tmp_path / "plan.json").apply(Classifier()).eval()
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(*batch()), small(*batch()))
    assert again.rnn.hidden_size == 6


def test_the_masked_model_trains():
    smodel = SparseModel(Classifier(), {"SPARSER": {"RATIO": 0.5}}, (torch.randn(3, 5, 6), LENGTHS))
    smodel.calc_params()
    smodel.train()(*batch()).sum().backward()
    assert smodel.model.rnn.weight_hh_l0.grad.isfinite().all()


# -- recurrent layers ----------------------------------------------------------------------------------------
def last_state(m, x, lengths):
    state = m.rnn(pack_padded_sequence(m.a(x), lengths, True, False))[1]
    h = state[0] if isinstance(m.rnn, nn.LSTM) else state
    return m.fc(torch.cat([h[-2], h[-1]], 1) if m.rnn.bidirectional else h[-1])


@pytest.mark.parametrize("forward", [None, last_state])
@pytest.mark.parametrize(
    "kind, options",
    [
        (nn.LSTM, {"bidirectional": True}),
        (nn.LSTM, {"proj_size": 4}),
        (nn.LSTM, {"proj_size": 4, "num_layers": 2, "bidirectional": True}),
        (nn.GRU, {}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True}),
        (nn.RNN, {"num_layers": 2, "nonlinearity": "relu"}),
    ],
)
def test_every_kind_of_layer(kind, options, forward):
    model = Classifier(kind, **options) if forward is None else Written(forward, kind, **options)
    smodel, small = pruned(model, EXAMPLE)
    assert (small.rnn.input_size, small.rnn.hidden_size) == (8, 6)
    assert getattr(small.rnn, "proj_size", 0) == options.get("proj_size", 0) // 2
    assert_same(smodel, small, *OTHER)


def given_state(m, x, lengths):
    state = torch.zeros(1, x.size(0), 12)
    out, _ = m.rnn(pack_padded_sequence(m.a(x), lengths, True, False), (state, state))
    return m.fc(pad_packed_sequence(out, True)[0])


def test_a_first_state_follows():
    smodel, small = pruned(Written(given_state), EXAMPLE)
    assert small.rnn.hidden_size == 6
    assert_same(smodel, small, *OTHER)


# -- how it is written ---------------------------------------------------------------------------------------
def time_first(m, x, lengths):
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        input=m.a(x).transpose(0, 1), lengths=lengths, enforce_sorted=False
    )
    return m.fc(renamed.pad_packed_sequence(sequence=m.rnn(packed)[0], total_length=x.size(1))[0])


def sorted_first(m, x, lengths):
    lengths, order = lengths.sort(descending=True)
    out, _ = m.rnn(renamed.pack_padded_sequence(m.a(x)[order], lengths, True))
    return m.fc(pad_packed_sequence(out, batch_first=True)[0].index_select(0, order.argsort()))


def masked_mean(m, x, lengths):
    packed = m.pack(m.a(x), lengths.tolist(), enforce_sorted=False)
    out, n = pad_packed_sequence(m.rnn(packed)[0], True)
    mask = torch.arange(out.size(1))[None] < n[:, None]
    return m.fc((out * mask.unsqueeze(-1)).sum(1) / n.unsqueeze(1))


def last_step(m, x, lengths):
    out, _ = pad_packed_sequence(m.rnn(pack_padded_sequence(m.a(x), lengths, True, False))[0], True)
    return m.fc(out[torch.arange(out.size(0)), lengths - 1])


def through_data(m, x, lengths):
    x = pack_padded_sequence(x, lengths, True, False)
    x = PackedSequence(m.a(x.data).relu(), x.batch_sizes, x.sorted_indices, x.unsorted_indices)
    out, _ = m.rnn(x)
    return m.fc(out.data), PackedSequence(m.fc(out[0]), *out[1:])


def replaced(m, x, lengths):
    x = pack_padded_sequence(x, lengths, True, False)
    out, _ = m.rnn(x._replace(data=m.a(x.data)))
    return m.fc(pad_packed_sequence(out._replace(data=out.data.tanh()).to(torch.float32))[0])


def asked(m, x, lengths):
    x = pack_padded_sequence(m.a(x), lengths, True, False)
    out = m.rnn(x if isinstance(x, PackedSequence) else x.transpose(0, 1))[0]
    out = pad_packed_sequence(out)[0] if isinstance(out, PackedSequence) else out * 0
    return m.fc(out)


def sequences_of_two(m, x, lengths):
    return m.fc(m.rnn(pack_sequence([m.a(x[0]), m.a(x[1])]))[1][0])


WAYS = [time_first, sorted_first, masked_mean, last_step, through_data, replaced, asked, sequences_of_two]


@pytest.mark.parametrize("forward", WAYS, ids=lambda f: f.__name__)
def test_every_way_to_write_it(forward):
    smodel, small = pruned(Written(forward), EXAMPLE)
    assert (small.rnn.input_size, small.rnn.hidden_size) == (8, 6), small.pruning_plan.reasons
    assert_same(smodel, small, *OTHER)


@pytest.mark.parametrize("made", [lambda n: n, lambda n: torch.tensor(n)])
def test_lengths_in_a_list(made):
    """They are others in every batch, also for the masked model."""

    class Listed(Classifier):
        def forward(self, x, lengths):
            return last_state(self, x, made(lengths))

    smodel, small = pruned(Listed(), (EXAMPLE[0], [3, 5, 2]))
    assert small.rnn.hidden_size == 6
    assert_same(smodel, small, OTHER[0], [2, 7, 1, 7])


def test_a_list_of_numbers_is_known_where_the_number_of_them_counts():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x, sizes, times):
            return sum(part.mean() for part in self.b(self.a(x)).split(sizes, 1)) * times

    smodel = SparseModel(Split().eval(), {"SPARSER": {"RATIO": 0.5}}, (EXAMPLE[0], [3, 2], 1))
    assert not smodel.model.meta["islands"] and smodel(EXAMPLE[0], [3, 2], 2) is not None
    with pytest.raises(TraceError, match="sizes"):
        smodel(EXAMPLE[0], [3, 1, 1], 1)


@pytest.mark.parametrize("made", [list, torch.tensor])
def test_lengths_in_a_list_inside_another_input(made):
    """The graph would have those of the example."""

    def forward(m, batch):
        return last_state(m, batch["x"], made(batch["lengths"]))

    model = Written(forward).eval()
    example, other = ({"x": x, "lengths": lengths.tolist()} for x, lengths in (EXAMPLE, OTHER))
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, (example,)).eval()
    assert "the lengths are numbers" in smodel.model.meta["islands"][""].error
    torch.testing.assert_close(smodel(other), model(other))


def test_the_graph_alone_is_saved_and_runs_on_other_lengths():
    model = Classifier().eval()
    walk = walk_of(model, EXAMPLE)
    part = walk.slices["rnn.weight_hh_l0", 1]
    cut = Cut(walk, walk.labels.roots(part.labels)[:5].unique())
    small, file = compact_with_plan(model, cut, as_written=False), io.BytesIO()
    assert small.get_submodule("rnn").hidden_size == 7
    torch.save(small, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    torch.testing.assert_close(again(*OTHER), cut.masked().eval()(*OTHER), rtol=1e-5, atol=1e-5)


def test_a_budget_of_multiplications_is_met():
    model = Classifier().eval()
    small = sparsebit.prune(model, EXAMPLE, macs=0.5)

    def count(m):
        with FlopCounterMode(display=False) as counter:
            m(*EXAMPLE)
        return counter.get_total_flops()

    assert 0.3 < count(small) / count(model) <= 0.5


# -- padding -------------------------------------------------------------------------------------------------
def padded_with(value, then):
    def forward(m, x, lengths):
        out, _ = m.rnn(pack_padded_sequence(m.a(x), lengths, True, False))
        return then(m, pad_packed_sequence(out, True, padding_value=value)[0])

    return forward


@pytest.mark.parametrize(
    "value, then",
    [
        (1.5, lambda m, out: m.fc(out)),
        (-1e9, lambda m, out: m.fc(out.max(1)[0])),
        (-torch.inf, lambda m, out: m.fc(out.max(1)[0])),
        (-torch.inf, lambda m, out: m.fc(torch.amax(out, dim=-2))),
        (-torch.inf, lambda m, out: m.fc(out.max(dim=1).values)),
    ],
)
def test_padding_other_than_zero(value, then):
    smodel, small = pruned(Written(padded_with(value, then)), EXAMPLE)
    assert small.rnn.hidden_size == 6, small.pruning_plan.reasons
    assert_same(smodel, small, *OTHER)


@pytest.mark.parametrize(
    "value, then, why",
    [
        (-torch.inf, lambda m, out: m.fc(out.sigmoid()), "pads with -inf"),
        (torch.inf, lambda m, out: m.fc(-(-out).max(1)[0].clamp(-9)), "pads with inf"),
        (-torch.inf, lambda m, out: m.fc(out.max(0)[0].sigmoid()), "pads with -inf"),
        (1.5, lambda m, out: m.fc(out).sum() + out.sum(-1), "sum"),
    ],
)
def test_padding_that_keeps_the_units(value, then, why):
    smodel, small = pruned(Written(padded_with(value, then)), EXAMPLE)
    assert (small.rnn.input_size, small.rnn.hidden_size) == (8, 12)
    assert any(why in reason for reason in small.pruning_plan.reasons)
    assert_same(smodel, small, *OTHER)


# -- inputs that are sequences -------------------------------------------------------------------------------
def sequences(*lengths):
    return [torch.randn(n, 6) for n in lengths]


def of_packed(m, x):
    if not isinstance(x, PackedSequence):
        raise TypeError("packed sequences only")
    out, _ = m.rnn(x._replace(data=m.a(x.data)))
    return m.fc(pad_packed_sequence(out)[0])


@pytest.mark.parametrize("sort", [True, False])
def test_a_packed_input(sort, tmp_path):
    """Whether it has an order is not written down: later ones may differ from the example."""
    example = pack_sequence(sequences(5, 3, 2), enforce_sorted=sort)
    smodel, small = pruned(Written(of_packed), example)
    assert small.rnn.hidden_size == 6
    for other in (pack_sequence(sequences(2, 7), enforce_sorted=False), pack_sequence(sequences(4, 1, 1))):
        assert_same(smodel, small, other)
    small.pruning_plan.save(tmp_path / "plan.json")
    again = sparsebit.sparse.Plan.load(tmp_path / "plan.json").apply(Written(of_packed))
    assert again.rnn.hidden_size == 6


def test_batches_of_packed_inputs():
    batches = [pack_sequence(sequences(5, 3)), pack_sequence(sequences(2, 4), enforce_sorted=False)]
    config = {"SPARSER": {"RATIO": 0.5, "STRATEGY": "wanda", "REFIT": False}}
    assert (
        sparsebit.prune(Written(of_packed), batches[0], config=config, batches=batches).rnn.hidden_size == 6
    )


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, xs: m.fc(m.rnn(m.a(pad_sequence(xs, batch_first=True)))[0]),
        lambda m, xs: of_packed(m, pack_sequence(xs, enforce_sorted=False)),
        lambda m, xs: of_packed(m, pack_sequence(enforce_sorted=False, sequences=xs)),
    ],
)
def test_a_list_of_sequences_may_be_longer_or_shorter(forward):
    smodel, small = pruned(Written(forward), (sequences(5, 3, 2),))
    assert small.rnn.hidden_size == 6
    for other in (sequences(7, 7, 2, 1), sequences(4)):
        assert_same(smodel, small, other)


# -- what runs as it is --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "forward, example, other",
    [
        (lambda m, xs: m.fc(m.rnn(pack_sequence([m.a(x) for x in xs]))[1][0]), (5, 3), (5, 3, 2)),
        (
            lambda m, xs: last_state(m, pad_sequence(xs, True), torch.tensor([x.size(0) for x in xs])),
            (3, 5),
            (2, 5, 4),
        ),
    ],
)
def test_a_list_that_is_taken_apart(forward, example, other):
    """A longer list than the example has would lose its last sequences."""
    model = Written(forward).eval()
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, (sequences(*example),)).eval()
    assert "list" in smodel.model.meta["islands"][""].error
    other = sequences(*other)
    torch.testing.assert_close(smodel(other), model(other))


def test_unpacked_sequences():
    def forward(m, x, lengths):
        out, _ = m.rnn(pack_padded_sequence(m.a(x), lengths, True, False))
        return m.fc(torch.stack([each.mean(0) for each in unpack_sequence(out)]))

    model = Written(forward).eval()
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, EXAMPLE).eval()
    assert "cannot be iterated" in smodel.model.meta["islands"][""].error
    torch.testing.assert_close(smodel(*OTHER), model(*OTHER))


def test_torch_is_as_it_was():
    code = pack_padded_sequence.__code__, pad_sequence.__code__, PackedSequence.__new__
    walk_of(Classifier(), EXAMPLE)
    assert (pack_padded_sequence.__code__, pad_sequence.__code__, PackedSequence.__new__) == code
    assert pack_padded_sequence.__kwdefaults__ is None
    with pytest.raises(TypeError):
        pack_padded_sequence(torch.randn(2, 3, 4), nothing=1)
