"""Functional dropout in a traced graph: what follows self.training is switched by train() and eval(), no other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.graph.trace.from_module import trace
from sparsebit.graph.trace.tracer import LeafTracer

X = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)


class Drops(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.regularized, self.p = way, False, 0.5
        self.part = nn.Identity()

    def forward(self, x):
        return self.way(self, self.part(x))


def graph_of(way, example=None) -> fx.GraphModule:
    return trace(Drops(way).train(), LeafTracer(), example)


def is_random(gm: nn.Module) -> bool:
    return any(not torch.equal(gm(X), gm(X)) for _ in range(8))


def kinds(gm: fx.GraphModule) -> list[str]:
    """Of the modules that nobody but the tracer made."""
    return [
        type(gm.get_submodule(n.target)).__name__
        for n in gm.graph.nodes
        if n.op == "call_module" and n.target != "part"
    ]


def _helper(x, p, training):
    return F.dropout(x, p, training)


SWITCHED = {
    "Dropout": [
        lambda m, x: F.dropout(x, m.p, m.training),
        lambda m, x: F.dropout(x, training=m.training, p=0.5),
        lambda m, x: torch.dropout(x, 0.5, m.training),
        lambda m, x: torch.dropout(x, p=0.5, train=m.training),
        lambda m, x: _helper(x, 0.5, m.training),
        lambda m, x: F.dropout(x * 2, 0.5, m.training, inplace=True),
        lambda m, x: F.dropout(x, 0.5, m.regularized or m.training),
    ],
    "Dropout1d": [lambda m, x: F.dropout1d(x.flatten(2), training=m.training)],
    "Dropout2d": [lambda m, x: F.dropout2d(x, training=m.training)],
    "Dropout3d": [lambda m, x: F.dropout3d(x[:, :, None], training=m.training)],
    "AlphaDropout": [
        lambda m, x: F.alpha_dropout(x, training=m.training),
        lambda m, x: torch.alpha_dropout(x, 0.5, m.training),
    ],
    "FeatureAlphaDropout": [lambda m, x: F.feature_alpha_dropout(x, 0.5, training=m.training)],
}


@pytest.mark.parametrize("kind, way", [(k, way) for k, ways in SWITCHED.items() for way in ways])
def test_dropout_of_self_training_is_switched(kind, way):
    gm = graph_of(way, ((X,), {}))
    assert not gm.meta["islands"] and kinds(gm) == [kind]
    assert is_random(gm)  # the model was in training
    assert not is_random(gm.eval())
    torch.testing.assert_close(gm(X), Drops(way).eval()(X))
    assert is_random(gm.train())


LITERAL = {
    "on": (lambda m, x: F.dropout(x, 0.5, True), True),
    "on by default": (lambda m, x: F.dropout(x), True),
    "off": (lambda m, x: F.dropout(x, 0.5, False), False),
    "off beside a read of the flag": (lambda m, x: F.dropout(x, 0.5, False) + 0 * int(m.training), False),
    # what it would be in training is not known
    "half": (lambda m, x: F.dropout(x, 0.5, m.training and m.regularized), False),
    "the opposite": (lambda m, x: F.dropout(x, 0.5, not m.training), True),
}


@pytest.mark.parametrize("way", LITERAL)
def test_what_is_written_stays(way):
    op, random = LITERAL[way]
    gm = graph_of(op)
    assert not kinds(gm)
    assert is_random(gm.eval()) is is_random(gm.train()) is random


def test_the_flag_is_that_of_the_module_that_makes_the_call():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Drops(SWITCHED["Dropout"][0]).eval(), Drops(SWITCHED["Dropout"][0])

        def forward(self, x):
            return self.b(self.a(F.dropout(self.b(x), 0.5, self.training)))

    gm = trace(Both(), LeafTracer())
    flags = {path: m.training for path, m in gm.named_modules() if isinstance(m, nn.Dropout)}
    assert flags == {"b.dropout": True, "dropout": True, "a.dropout": False, "b.dropout_1": True}


def test_a_taken_name_is_left_alone():
    def way(m, x):
        return m.dropout(F.dropout(x, 0.5, m.training))

    model = Drops(way)
    model.dropout = nn.Dropout(0.25)
    gm = trace(model, LeafTracer())
    assert [gm.get_submodule(n.target).p for n in gm.graph.nodes if "dropout" in n.name] == [0.5, 0.25]


def _without_gradients(m, x):
    with torch.set_grad_enabled(m.training):
        return F.dropout(x, 0.5, m.training)


@pytest.mark.parametrize(
    "way",
    [
        _without_gradients,
        lambda m, x: F.dropout(x, 0.5, m.training) * (1 if m.training is False else 2),
        lambda m, x: F.dropout(x, 0.5, m.training) if m.training is False else x,
    ],
)
def test_a_forward_that_takes_only_a_bool_is_traced_as_before(way):
    gm = graph_of(way, ((X,), {}))
    assert not gm.meta["islands"]
    torch.testing.assert_close(gm.eval()(X), Drops(way).eval()(X))


def test_dropout_beside_a_list_of_inputs():
    """The guard of the list is put into the graph after it was compared with the second trace."""

    class Sums(nn.Module):
        def forward(self, xs, *more):
            return F.dropout(sum(xs) + sum(more), 0.5, self.training)

    gm = trace(Sums().train(), LeafTracer(), (([X, X], X), {}))
    assert kinds(gm) == ["Dropout"]
    assert not torch.equal(gm([X, X], X), gm([X, X], X))


def test_dropout_of_a_buffer_leaves_the_others_alone():
    def way(m, x):
        return F.dropout(x, 0.5, m.training) + F.dropout(m.table, 0.5, m.training).sum()

    model = Drops(way)
    model.register_buffer("table", torch.ones(8))
    gm = trace(model.train(), LeafTracer())
    assert kinds(gm)[:1] == ["Dropout"] and is_random(gm)
    F.dropout(X, 0.5, False)
    assert "dropout" not in vars(torch._VF)


@pytest.mark.parametrize("way", [_without_gradients, LITERAL["half"][0]])
def test_dropout_that_is_lost_is_a_warning(way, caplog):
    graph_of(way)
    assert "functional dropout stays off in training" in caplog.text


def test_nothing_of_the_second_trace_is_left():
    kept = vars(nn.Module).get("training")
    model = Drops(SWITCHED["Dropout"][0]).train()
    trace(model, LeafTracer())
    assert vars(nn.Module).get("training") is kept is None
    assert model.training is True and list(dict(model.named_modules())) == ["", "part"]


ATTENTION = [
    lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=m.p if m.training else 0.0),
    lambda m, x: F.scaled_dot_product_attention(x, x, x, None, m.p if m.training else 0.0),
    lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=m.p * m.training),
    lambda m, x: F.scaled_dot_product_attention(x + 1, x, x, dropout_p=m.p if m.training else 0) + x,
    lambda m, x: F.scaled_dot_product_attention(x if not m.training else x * 2, x, x, None, m.p * m.training),
]


@pytest.mark.parametrize("way", ATTENTION)
@pytest.mark.parametrize("example", [None, ((X,), {})])
def test_dropout_of_attention_is_switched(way, example):
    gm = graph_of(way, example)
    assert not gm.meta["islands"] and kinds(gm) == ["Rate"]
    assert is_random(gm)
    assert not is_random(gm.eval())
    torch.testing.assert_close(gm(X), Drops(way).eval()(X))
    again = trace(gm, LeafTracer(), example)
    assert is_random(again.train()) and not is_random(again.eval())


@pytest.mark.parametrize("rate, random", [(0.0, False), (0.5, True)])
def test_a_rate_of_attention_that_is_written_down_stays(rate, random, caplog):
    gm = graph_of(lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=rate))
    assert kinds(gm) == [] and is_random(gm.eval()) == random and not caplog.text


def test_attention_that_training_does_otherwise_is_told(caplog):
    twice = lambda m, x: F.scaled_dot_product_attention(x, x, x) if m.training else x
    graph_of(lambda m, x: F.scaled_dot_product_attention(twice(m, x), x, x, dropout_p=m.p * m.training))
    assert "runs other calls in training" in caplog.text
