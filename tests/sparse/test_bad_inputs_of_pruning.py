"""What a user can get wrong when pruning: a typed error that says where, what, and what to do, before long work."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from sparsebit.errors import CalibrationError, ConfigError, SparsebitError
from sparsebit.sparse import SparseModel, prune_blocks


class Net(nn.Module):
    """Two residual blocks, so that depth and merge have something to do."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
            for _ in range(2)
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean((2, 3)))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


X, LABELS = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(4)
WITH_NAN = X.clone().index_fill_(0, torch.tensor([1]), float("nan"))


# -- the model and the example -----------------------------------------------------------------------------
def pruned(*args, **options):
    """Whole blocks with prune_blocks(), anything else with prune()."""
    function = prune_blocks if {"merge", "depth"} & options.keys() else sparsebit.prune
    return function(*args, **options)


@pytest.mark.parametrize("options", [{}, {"scope": "global"}, {"sparser": "wanda"}, {"depth": 1}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(net, value, options):
    net.blocks[1][0].weight.data[2, 0] = value
    with pytest.raises(
        SparsebitError, match=r"blocks\.1\.0\.weight: 9 of 576 values are NaN or infinite; take"
    ):
        pruned(net, X, 0.5, batches=[X], **options)


def test_infinities_that_are_meant():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
            self.mask = nn.Parameter(torch.full((3, 3), -torch.inf).triu(1), requires_grad=False)

        def forward(self, x):
            y = self.a(x)
            return self.b((y @ y.mT + self.mask).softmax(-1) @ y)

    assert sparsebit.prune(Attention().eval(), torch.randn(2, 3, 4), 0.5).a.out_features == 4


def test_a_quantized_model_says_to_prune_first(net):
    quantized = sparsebit.quantize(net, [X])
    for model in (quantized, nn.Sequential(quantized)):
        with pytest.raises(SparsebitError, match="prune the float model first, then quantize"):
            sparsebit.prune(model, X, 0.5)


def test_numpy_arrays(net):
    with pytest.raises(SparsebitError, match="example: is a numpy array; pass a tensor"):
        sparsebit.prune(net, X.numpy(), 0.5)
    with pytest.raises(SparsebitError, match="batch 2: is a numpy array; pass a tensor"):
        sparsebit.prune(net, X, 0.5, batches=[X, (X.numpy(), LABELS)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="it can be used here")
def test_a_device_that_the_machine_lacks(net):
    with pytest.raises(ConfigError, match=r"DEVICE: cuda:1 cannot be used on this machine: .*; write cpu"):
        sparsebit.prune(net, X, config={"DEVICE": "cuda:1", "SPARSER": {"RATIO": 0.5}})


# -- batches -----------------------------------------------------------------------------------------------
WRONG = {
    "another shape": (X[:, :2], "does not run on batch 2: RuntimeError: Given groups=1"),
    "nothing": (None, "batch 2 is None"),
    "NaN": (WITH_NAN, "batch 2 has NaN or Inf, 108 of 432 values"),
}


@pytest.mark.parametrize("options", [{}, {"sparser": "wanda"}, {"depth": 1}, {"merge": 1}])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_batch_that_does_not_fit_is_named(net, wrong, options):
    batch, message = WRONG[wrong]
    with pytest.raises(CalibrationError, match=message) as caught:
        pruned(net, X, 0.5, batches=[X, batch], **options)
    assert isinstance(caught.value.__cause__, RuntimeError) == (wrong == "another shape")


def test_a_batch_that_the_model_copes_with_is_none_of_our_business(net):
    class Copes(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x.nan_to_num())

    small = sparsebit.prune(Copes().eval(), X, 0.5, batches=[X, WITH_NAN], progress=False)
    assert small(X).isfinite().all()


@pytest.mark.parametrize("step", ["tune_batchnorm", "refit"])
def test_every_step_names_the_batch(net, step):
    smodel = SparseModel(net, {"SPARSER": {"RATIO": 0.5}}, X)
    smodel.calc_params()
    for batch, message in WRONG.values():
        with pytest.raises(CalibrationError, match=message):
            getattr(smodel, step)([X, batch])
    with pytest.raises(CalibrationError, match="`batches` is empty"):
        getattr(smodel, step)([])


def test_errors_of_the_loader_are_its_own(net):
    def broken():
        yield X
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        sparsebit.prune(net, X, 0.5, batches=broken())


# -- the loss ----------------------------------------------------------------------------------------------
LOSSES = {
    "not scalar": (
        lambda o, t: F.cross_entropy(o, t, reduction="none"),
        r"got a tensor of \[4\] for batch 1",
    ),
    "a number": (lambda o, t: 1.0, "got a float for batch 1"),
    "detached": (lambda o, t: o.detach().sum(), "got one that is detached for batch 1"),
    "nothing": (lambda o, t: None, "got a NoneType for batch 1"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_what_a_loss_must_return(net, kind):
    loss, got = LOSSES[kind]
    with pytest.raises(CalibrationError, match=f"loss: must return a tensor of one number .*{got}"):
        sparsebit.prune(net, X, 0.5, sparser="taylor", batches=[(X, LABELS)], loss=loss)


def test_a_loss_that_fails(net):
    with pytest.raises(ConfigError, match=r"loss: expected a function of \(output, target\), got 'ce'"):
        sparsebit.prune(net, X, 0.5, sparser="taylor", batches=[(X, LABELS)], loss="ce")
    batches = [(X, LABELS), (X, LABELS + 3)]
    with pytest.raises(CalibrationError, match=r"\[4, 4\].* fails on batch 2: IndexError: Target") as caught:
        sparsebit.prune(net, X, 0.5, sparser="taylor", batches=batches)
    assert isinstance(caught.value.__cause__, IndexError)


# -- nothing that could go ---------------------------------------------------------------------------------
class ComputedSlope(nn.Module):
    """The slope of its activation is computed, which keeps its only hidden channels."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.slope = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), nn.Parameter(torch.rand(8))

    def forward(self, x):
        return self.b(F.prelu(self.a(x), self.slope[:1]))


def test_where_nothing_can_go_the_reason_is_said(caplog):
    with caplog.at_level(logging.WARNING, "sparsebit"):
        small = sparsebit.prune(ComputedSlope().eval(), X, 0.5)
    assert small.a.out_channels == 8
    assert "can be removed: prelu: its weight is computed" in caplog.text


def test_the_sparser_in_use_is_not_recommended():
    with pytest.raises(ConfigError, match=r"slimming judges .*; use l1norm or wanda with batches or taylor"):
        sparsebit.prune(
            nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), X[:, :, 0, 0], 0.5, sparser="slimming"
        )
    with pytest.raises(ConfigError, match=r"taylor judges .*; use l1norm or wanda with batches$"):
        unread = lambda output, target: torch.zeros((), requires_grad=True)
        net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
        sparsebit.prune(net, X[:, :, 0, 0], 0.5, sparser="taylor", batches=[X[:, :, 0, 0]], loss=unread)


def test_a_target_behind_the_inputs_is_no_input():
    """`(x, y)` of a DataLoader means the same to `prune` as to `quantize`: y is a target."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x, y = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    with_target = sparsebit.prune(model, (x, y), ratio=0.5)
    without = sparsebit.prune(model, x, ratio=0.5)
    assert torch.equal(with_target(x), without(x))
    assert with_target[0].out_features == 8
