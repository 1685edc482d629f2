"""Settings of single layers, sparsers on layers of every kind, rounding, budgets, plans, and what is refused."""

from __future__ import annotations

import inspect
import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from sparsebit.errors import CalibrationError, ConfigError, SparsebitError
from sparsebit.sparse import Plan, SparseModel, parse_sconfig
from sparsebit.sparse.plan import _describe, _rebuild
from sparsebit.sparse.sparsers import SPARSERS_MAP


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def masked(net: nn.Module, x: torch.Tensor, **section: object) -> SparseModel:
    smodel = SparseModel(net, {"SPARSER": {"TYPE": "unstructured", **section}}, x)
    if any(opr.sparser.NEEDS for opr in smodel.oprs().values()):
        smodel.calibrate([x])
    smodel.calc_params()
    return smodel


# -- single weights: every layer by its own settings ---------------------------------------------------------
@pytest.mark.parametrize(
    "section, want",
    [
        ({"PATTERN": "2:4", "SPECIFIC": [{"2": ["PATTERN", None]}]}, {"0": 0.5, "2": 0.0}),
        ({"PATTERN": "2:4", "SPECIFIC": [{"2": ["PATTERN", "1:4"]}]}, {"0": 0.5, "2": 0.75}),
        ({"PATTERN": "2:4", "SPECIFIC": [{"2": ["PATTERN", None, "RATIO", 0.25]}]}, {"0": 0.5, "2": 0.25}),
        ({"SPECIFIC": [{"0": ["PATTERN", "2:4"]}]}, {"0": 0.5, "2": 0.0}),
        ({"SCOPE": "global", "RATIO": 0.5, "SPECIFIC": [{"2": ["RATIO", 0.125]}]}, {"0": 0.5, "2": 0.125}),
        ({"RATIO": 1.0}, {"0": 255 / 256, "2": 63 / 64}),  # never a layer to zero
        ({"RATIO": 1.0, "SCOPE": "global"}, {"0": 255 / 256, "2": 63 / 64}),
    ],
)
def test_settings_of_single_layers(section, want):
    assert masked(mlp(), torch.randn(2, 16), **section).sparsity() == want


def test_a_layer_stays_whole_under_a_pattern():
    smodel = SparseModel(mlp(), {"SPARSER": {"TYPE": "unstructured", "PATTERN": "2:4"}}, torch.randn(2, 16))
    last = smodel.model.get_submodule("2").sparser
    last.set_ratio(0.0)
    smodel.calc_params()
    assert smodel.sparsity() == {"0": 0.5, "2": 0.0}
    last.set_ratio(0.5)  # what the pattern takes: back again
    smodel.calc_params()
    assert smodel.sparsity() == {"0": 0.5, "2": 0.5}
    with pytest.raises(ConfigError, match=r"PATTERN 2:4 takes 0\.5 of a layer"):
        last.set_ratio(0.3)


def test_ratios_set_later_count_in_a_ranking_of_all():
    smodel = SparseModel(
        mlp(), {"SPARSER": {"TYPE": "unstructured", "SCOPE": "global", "RATIO": 0.5}}, torch.randn(2, 16)
    )
    smodel.set_ratio(0.25)
    smodel.calc_params()
    zeros = {path: int((~opr.mask_of("weight")).sum()) for path, opr in smodel.oprs().items()}
    assert sum(zeros.values()) == 0.25 * (256 + 64)
    weights = torch.cat([opr.weight.detach().abs().flatten() for opr in smodel.oprs().values()])
    threshold = float(weights.sort().values[80])
    assert zeros == {p: int((o.weight.abs() < threshold).sum()) for p, o in smodel.oprs().items()}


@pytest.mark.parametrize(
    "section, message",
    [
        (
            {"SPECIFIC": [{"2": ["ROUND_TO", 4]}]},
            r"SPECIFIC\[0\]\['2'\]: ROUND_TO belongs to the whole model",
        ),
        ({"SPECIFIC": [{"2": ["TYPE", "unstructured"]}]}, "TYPE belongs to the whole model"),
        ({"SPECIFIC": [{"2": ["SCOPE", "global"]}]}, "SCOPE belongs to the whole model"),
        (
            {"TYPE": "unstructured", "PATTERN": "2:4", "SPECIFIC": [{"2": ["RATIO", 0.0]}]},
            "RATIO has no effect beside PATTERN",
        ),
        (
            {"TYPE": "unstructured", "SPECIFIC": [{"*": ["PATTERN", "2:4"]}, {"2": ["RATIO", 0.3]}]},
            "RATIO has no effect beside PATTERN",
        ),
        (
            {"TYPE": "unstructured", "SPECIFIC": [{"2": ["RATIO", 0.3, "PATTERN", "2:4"]}]},
            "RATIO has no effect beside PATTERN",
        ),
    ],
)
def test_settings_that_no_layer_can_have_alone(section, message):
    with pytest.raises(ConfigError, match=message):
        parse_sconfig({"SPARSER": section})


# -- transposed convolutions ---------------------------------------------------------------------------------
@pytest.mark.parametrize("groups", [1, 2])
def test_patterns_count_along_the_inputs_of_a_transposed_convolution(groups):
    layer = nn.ConvTranspose2d(12, 6, 2, groups=groups)
    mask = masked(nn.Sequential(layer), torch.randn(1, 12, 4, 4), PATTERN="2:3").oprs()["0"].mask_of("weight")
    size = 12 // groups
    for g in range(groups):  # every output reads the inputs of its group: two of three of them stay
        one_group = mask[g * size : (g + 1) * size]
        for part in one_group.split(3):
            assert bool((part.sum(0) == 2).all())


@pytest.mark.parametrize("groups", [1, 2])
def test_wanda_ranks_inside_every_output_of_a_transposed_convolution(groups):
    layer, x = nn.ConvTranspose2d(8, 6, 2, groups=groups, bias=False), torch.randn(4, 8, 3, 3)
    with torch.no_grad():
        layer.weight[:, 0] *= 100  # one output is much larger than the others: it loses half all the same
    smodel = masked(nn.Sequential(layer), x, STRATEGY="wanda", RATIO=0.5)
    mask = smodel.oprs()["0"].mask_of("weight")
    size = x.square().mean((0, 2, 3)).sqrt()
    for g in range(groups):
        rows = slice(g * 8 // groups, (g + 1) * 8 // groups)
        for out in range(6 // groups):
            worth = layer.weight[rows, out].detach().abs() * size[rows].view(-1, 1, 1)
            assert torch.equal(mask[rows, out], worth > worth.flatten().sort().values[worth.numel() // 2 - 1])


# -- sparsers on layers of every kind ------------------------------------------------------------------------
class Transposed(nn.Module):
    """Grouped, depthwise with two filters each, and plain."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.t = nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 24, 2, 2, groups=4)
        self.u, self.v = nn.ConvTranspose2d(24, 48, 3, groups=24), nn.ConvTranspose2d(48, 20, 3)
        self.c = nn.Conv2d(20, 4, 1)

    def forward(self, x):
        for layer in (self.a, self.t, self.u, self.v):
            x = F.leaky_relu(layer(x))
        return self.c(x).mean((2, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(24, 16, batch_first=True, bidirectional=True), nn.Linear(32, 4)

    def forward(self, x):
        return self.fc(self.lstm(x.permute(0, 2, 1, 3).flatten(2))[0][:, -1])


class ChannelsLast(nn.Module):
    """Linear layers make maps, too: (images, height, width, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 12, 3), nn.Linear(12, 24), nn.Linear(24, 4)

    def forward(self, x):
        return self.b(self.a(self.stem(x).permute(0, 2, 3, 1)).relu()).mean((1, 2))


class Beside(nn.Module):
    """A layer that the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(192, 16), nn.Linear(16, 4), nn.Linear(16, 5)

    def forward(self, x):
        x = self.a(x.flatten(1)).relu()
        return self.b(x), self.c(x).detach()


SAYS_NOTHING = {
    "slimming": (Transposed, Recurrent, ChannelsLast, Beside),
    "hrank": (Recurrent, Beside),
    "fisher": (Recurrent,),
    "l0": (Recurrent,),
}
KINDS = [(s, kind) for s in SPARSERS_MAP if not s.startswith("test") for kind in SPARSERS_MAP[s].KINDS]


@pytest.mark.parametrize("net", [Transposed, Recurrent, ChannelsLast, Beside])
@pytest.mark.parametrize("strategy, kind", KINDS)
def test_every_sparser_on_every_layer(strategy, kind, net):
    model, x, y = net().eval(), torch.randn(6, 3, 8, 8), torch.arange(6) % 4
    first = lambda out: out[0] if isinstance(out, tuple) else out
    smodel = SparseModel(model, {"SPARSER": {"TYPE": kind, "STRATEGY": strategy, "RATIO": 0.5}}, x)
    smodel.calibrate([(x, y)], lambda out, target: F.cross_entropy(first(out), target))
    if kind == "structured" and net in SAYS_NOTHING.get(strategy, ()):
        with pytest.raises(ConfigError, match=f"STRATEGY: {strategy} judges"):
            smodel.calc_params()
        return
    smodel.calc_params()
    small = smodel.compact()
    torch.testing.assert_close(first(small(x)), first(smodel(x)), rtol=1e-4, atol=1e-5)


def test_gradients_in_the_groups_of_a_transposed_convolution():
    """All of the loss goes through channel 1 of both groups, whose filters are the smallest."""
    model = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 1, groups=2), nn.Conv2d(6, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    with torch.no_grad():
        model[0].weight[:, 1] *= 0.1
        model[1].weight[:, [0, 2, 3, 5]] *= 1e-4
    x, y = torch.randn(16, 4, 4, 4), torch.arange(16) % 5
    for strategy in ("taylor", "fisher"):
        smodel = SparseModel(model, {"SPARSER": {"STRATEGY": strategy, "RATIO": 0.6}}, x).calibrate([(x, y)])
        smodel.calc_params()
        mask = smodel.oprs()["0"].mask_of("weight")
        kept = mask.flatten(2).any(2)
        assert int(kept[0].sum()) == 2 and bool(kept[:, 1].all()), (
            strategy
        )  # 2 of 3 in every group, 1 among them


def test_taylor_of_a_grouped_transposed_convolution_by_hand():
    layer = nn.ConvTranspose2d(4, 6, 2, groups=2)
    x, y = torch.randn(3, 4, 2, 2), torch.randn(3, 6, 3, 3)
    mse = lambda out, target: F.mse_loss(out, target)
    model = nn.Sequential(layer, nn.Identity())
    smodel = SparseModel(model, {"SPARSER": {"STRATEGY": "taylor"}}, x).calibrate([(x, y)], mse)
    opr = smodel.oprs()["0"]
    got = opr.sparser.channels(opr, "weight", 1, True)
    mse(model(x), y).backward()
    slope = (layer.weight.grad * layer.weight).sum((2, 3)).detach()
    bias = (layer.bias.grad * layer.bias).detach()
    by_channel = torch.stack([slope[:2].sum(0), slope[2:].sum(0)]) + bias.view(2, 3)
    torch.testing.assert_close(got, by_channel.square().sum(0))


def test_l0_gates_channels_of_grouped_transposed_convolutions():
    layer, x = nn.ConvTranspose2d(4, 6, 2, groups=2), torch.randn(3, 4, 2, 2)
    smodel = SparseModel(nn.Sequential(layer, nn.Identity()), {"SPARSER": {"STRATEGY": "l0"}}, x).eval()
    gates = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    with torch.no_grad():
        smodel.oprs()["0"].sparser.log_alpha.copy_((gates.view(-1, 1, 1, 1) - 0.5) * 40)
    torch.testing.assert_close(smodel(x), layer(x) * gates.view(1, -1, 1, 1))
    torch.testing.assert_close(smodel.compact()(x), smodel(x))


# -- rounding, budgets ---------------------------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.a = nn.Linear(6, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.fc = nn.Linear(32, 5)

    def forward(self, x):
        x = self.e(x)
        return self.fc(self.a(x, x, x)[0])


@pytest.mark.parametrize("round_to, heads", [(4, 2), (8, 2), (16, 2), (32, 4)])
def test_a_head_counts_as_all_its_channels(round_to, heads):
    small = sparsebit.prune(Attention().eval(), torch.randn(2, 5, 6), 0.5, round_to=round_to)
    assert small.get_submodule("a.q_proj").out_features == 8 * heads


@pytest.mark.parametrize(
    "middle, round_to, want",
    [
        (lambda: nn.GroupNorm(8, 64), 8, 32),  # groups of eight channels
        (lambda: nn.GroupNorm(8, 64), 64, 64),
        (lambda: nn.Conv2d(64, 64, 1, groups=16), 4, 32),  # of every group, one channel
        (lambda: nn.Conv2d(64, 64, 1, groups=16), 64, 64),
        (lambda: nn.Flatten(2), 8, 32),
    ],
)
def test_round_to_counts_channels(middle, round_to, want):
    layers = [nn.Conv2d(3, 64, 1), middle(), nn.Flatten(1), nn.Linear(256, 4)]
    small = sparsebit.prune(nn.Sequential(*layers).eval(), torch.randn(2, 3, 2, 2), 0.5, round_to=round_to)
    assert small(torch.randn(2, 3, 2, 2)).shape == (2, 4)
    assert small.get_submodule("0").out_channels == want


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_layers_of_ratio_zero_are_not_rounded(scope):
    net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    section = {"RATIO": 0.5, "SCOPE": scope, "ROUND_TO": 8, "SPECIFIC": [{"0": ["RATIO", 0.0]}]}
    small = sparsebit.prune(net, torch.randn(2, 4), config={"SPARSER": section})
    assert small[0].out_features == 10 and small[2].out_features == 16


def test_a_layer_has_its_own_ratio_among_channels_of_all():
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).eval()
    section = {"RATIO": 0.5, "SCOPE": "global", "SPECIFIC": [{"1": ["RATIO", 0.125]}]}
    small = sparsebit.prune(net, torch.randn(2, 16), config={"SPARSER": section})
    widths = [layer.out_features for layer in small]
    assert widths[1] == 14 and widths[0] + widths[2] == 16


def test_budgets_that_make_no_sense():
    x = torch.randn(2, 4)
    with pytest.raises(ConfigError, match="macs: the model has none"):
        sparsebit.prune(nn.Sequential(nn.ReLU()), x, macs=0.5)
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    # one channel of each stays: 4 + 1 + 2 of 4 * 64 + 64 * 64 + 64 * 2 multiplications
    with pytest.raises(ConfigError, match=rf"0\.0005 cannot be reached.* {7 / 4480:.3g}.*an output"):
        sparsebit.prune(net, x, macs=0.0005)
    with pytest.raises(ConfigError, match="RATIO: is 0 for every layer"):
        SparseModel(net, None, x).calc_params(macs=0.5)


def test_a_budget_of_parameters_that_functions_read():
    net, x = Functional().eval(), torch.randn(2, 8)
    count = lambda m: sum(p.numel() for p in m.parameters())
    assert 0.5 * count(net) < count(sparsebit.prune(net, x, params=0.6)) <= 0.6 * count(net)


# -- what is said to prune() ---------------------------------------------------------------------------------
def test_what_is_said_goes_before_the_config():
    net, x = mlp(), torch.randn(2, 16)
    config = {"SPARSER": {"RATIO": 0.25, "STRATEGY": "random", "ROUND_TO": 8}}
    assert sparsebit.prune(net, x, config=config)[0].out_features == 16  # 12 is rounded to 16
    assert sparsebit.prune(net, x, 0.5, config=config)[0].out_features == 8
    small = sparsebit.prune(net, x, config=config, round_to=1, sparser="l1norm")
    assert torch.equal(small[0].weight, sparsebit.prune(net, x, 0.25)[0].weight)
    assert small[0].out_features == 12
    small = sparsebit.prune(net, x, params=0.5, config={"SPARSER": {"STRATEGY": "l2norm"}})
    assert 0 < small[0].out_features < 16
    with pytest.raises(ConfigError, match="PATTERN 2:4 of the config"):
        sparsebit.prune(net, x, 0.3, config={"SPARSER": {"TYPE": "unstructured", "PATTERN": "2:4"}})


@pytest.mark.parametrize(
    "model, message",
    [
        (lambda: torch.jit.trace(mlp(), torch.randn(2, 16)), "TorchScript"),
        (lambda: torch.jit.script(mlp()), "TorchScript"),
        (lambda: None, "expected an nn.Module, got a NoneType"),
        (lambda: mlp().state_dict(), "expected an nn.Module, got a OrderedDict"),
        (lambda: nn.Linear, "expected an nn.Module, got the class Linear"),
        (lambda: nn.ModuleList([nn.Linear(4, 4)]), "ModuleList has no forward"),
    ],
)
def test_no_model(model, message):
    x = torch.randn(2, 16)
    with pytest.raises(SparsebitError, match=re.escape(message)):
        sparsebit.prune(model(), x, 0.5)
    with pytest.raises(SparsebitError, match=re.escape(message)):
        sparsebit.prune(mlp(), x, 0.5).pruning_plan.apply(model())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ratio": "0.5"}, "ratio: expected a number such as 0.5, got '0.5'"),
        ({"macs": "half"}, "macs: expected a number such as 0.5, got 'half'"),
        ({"ratio": True}, "ratio: expected a number"),
        ({"round_to": "8"}, "round_to: must be at least 1, a whole number, got '8'"),
        ({"depth": 1.5}, "depth: expected how many, or a list of names, got 1.5"),
    ],
)
def test_no_numbers(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        sparsebit.prune(mlp(), torch.randn(2, 16), **options)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, *, x):
        return self.b(F.relu(self.a(x)))


def test_keyword_arguments_and_a_target():
    net, x, y = ByName().eval(), torch.randn(12, 8), torch.arange(12) % 4
    plain = nn.Sequential(net.a, nn.ReLU(), net.b)
    small = sparsebit.prune(net, {"x": x}, 0.5, sparser="taylor", batches=[({"x": x}, y)])
    want = sparsebit.prune(plain, x, 0.5, sparser="taylor", batches=[(x, y)])
    torch.testing.assert_close(small(x=x), want(x))
    for wrong in ((x, y), ({"z": x}, y), {"z": x}):
        with pytest.raises(CalibrationError, match=r"batches: do not fit forward\(\*, x\)"):
            sparsebit.prune(net, {"x": x}, 0.5, batches=[wrong])


@pytest.mark.parametrize("amount", [{"ratio": 0.5}, {"macs": 0.5}])
@pytest.mark.parametrize("sparser, what", [("hrank", "make maps"), ("slimming", "a batch norm behind")])
def test_a_sparser_that_has_nothing_to_say(sparser, what, amount):
    x = torch.randn(2, 16)
    with pytest.raises(ConfigError, match=f"STRATEGY: {sparser} judges layers .*{what}.* use l1norm"):
        sparsebit.prune(mlp(), x, **amount, sparser=sparser, batches=[x])
    with pytest.raises(ConfigError, match="sparsegpt judges Linear layers"):
        masked(
            nn.Sequential(nn.ConvTranspose2d(4, 8, 2)),
            torch.randn(1, 4, 3, 3),
            STRATEGY="sparsegpt",
            RATIO=0.5,
        )


# -- plans ---------------------------------------------------------------------------------------------------
class Padded(nn.Module):
    """Token 0 is padding: on zeros alone the encoder gives nothing but NaN."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.e, self.enc, self.fc = nn.Embedding(30, 16), nn.TransformerEncoder(layer, 1), nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.enc(self.e(x), src_key_padding_mask=x == 0).mean(1))


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.lstm, self.fc = nn.Linear(6, 16), nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, lengths):
        pack = nn.utils.rnn.pack_padded_sequence
        return self.fc(self.lstm(pack(self.a(x), lengths, True, False))[1][0][-1])


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16))
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(F.relu(F.linear(x, self.w, self.b)))


class Stateful(nn.Module):
    """Takes a tuple, a list, a dict and a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, both, more, named, times):
        h = self.a(x) * both[0] + both[1]
        return self.b(F.relu(h + more[0] * named["c"])) * (times if isinstance(both, tuple) else 0)


ONE = torch.ones(1)
CALLS = {
    "token ids": (Padded, (torch.arange(1, 15).view(2, 7),), {}, True),
    "lengths": (Lengths, (torch.randn(3, 5, 6), torch.tensor([5, 3, 2])), {}, True),
    "parameters of functions": (Functional, (torch.randn(2, 8),), {}, True),
    "structures": (Stateful, (torch.randn(2, 8), (ONE, ONE), [ONE], {"c": ONE}, 2), {}, True),
    "both kinds of arguments": (
        Stateful,
        (torch.randn(2, 8), (ONE, ONE)),
        {"more": [ONE], "named": {"c": ONE}, "times": 2},
        True,
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:.*nested.*")
def test_a_plan_rebuilds_its_example(name, tmp_path):
    make, args, kwargs, smaller = CALLS[name]
    model = make().eval()
    call = inspect.signature(model.forward).bind(*args, **kwargs)
    small = sparsebit.prune(model, call, 0.5).eval()
    count = lambda m: sum(p.numel() for p in m.parameters())
    assert (count(small) < count(model)) == smaller
    small.pruning_plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").apply(make().eval())
    again.load_state_dict(small.state_dict())
    torch.testing.assert_close(again(*args, **kwargs), small(*args, **kwargs))


def test_a_first_call_with_both_kinds_of_arguments(tmp_path):
    class Scaled(ByName):
        def forward(self, x, scale):
            return self.b(F.relu(self.a(x)) * scale)

    smodel, x, scale = SparseModel(Scaled(), {"SPARSER": {"RATIO": 0.5}}).eval(), torch.randn(2, 8), ONE * 3
    smodel.calc_params()
    want = smodel(x, scale=scale)
    smodel.plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").apply(Scaled().eval())
    again.load_state_dict(smodel.compact().state_dict())
    torch.testing.assert_close(again(x, scale=scale), want)


def test_integers_are_kept_exactly():
    values = [
        torch.tensor(7),
        torch.tensor([[True, False]]),
        torch.arange(-3, 3, dtype=torch.int16),
        torch.zeros(0, 2, dtype=torch.long),
    ]
    for value in values:
        again = _rebuild(json.loads(json.dumps(_describe(value))))
        assert again.dtype == value.dtype and torch.equal(again, value)


def test_an_example_that_no_file_can_hold():
    class Typed(ByName):
        def forward(self, x, dtype):
            return self.b(F.relu(self.a(x))).to(dtype)

    net, x = Typed().eval(), torch.randn(2, 8)
    plan = sparsebit.prune(net, (x, torch.float64), 0.5).pruning_plan
    with pytest.raises(SparsebitError, match=r"cannot hold torch\.float64.* apply\(model, example\)"):
        plan.apply(net)
    assert plan.apply(net, (x, torch.float64)).a.out_features == 8
    with pytest.raises(SparsebitError, match="the plan is of another model: its example does not fit"):
        sparsebit.prune(mlp(), torch.randn(2, 16), 0.5).pruning_plan.apply(net)


# -- what is read from YAML, and what is shown ---------------------------------------------------------------
@pytest.mark.parametrize("written", ["2:4", '"2:4"'])
def test_a_pattern_needs_no_quotes(written, tmp_path):
    """YAML takes 2:4 for minutes and seconds."""
    (tmp_path / "sconfig.yaml").write_text(f"SPARSER:\n  TYPE: unstructured\n  PATTERN: {written}\n")
    assert parse_sconfig(str(tmp_path / "sconfig.yaml")).SPARSER.PATTERN == "2:4"


@pytest.mark.parametrize("pattern", [7, "2of4", "4:", True])
def test_what_is_no_pattern(pattern):
    with pytest.raises(ConfigError, match=r'SPARSER.PATTERN: expected N:M such as "2:4", got'):
        parse_sconfig({"SPARSER": {"TYPE": "unstructured", "PATTERN": pattern}})


def test_a_ratio_beside_a_pattern():
    with pytest.raises(ConfigError, match=r"SPARSER.RATIO: is 0\.9, but PATTERN 2:4 decides"):
        parse_sconfig({"SPARSER": {"TYPE": "unstructured", "PATTERN": "2:4", "RATIO": 0.9}})


class Sides(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.u, self.n = nn.ConvTranspose2d(8, 6, 2, 2), nn.BatchNorm2d(6)
        self.r, self.o = nn.LSTM(6, 10, 2), nn.Linear(10, 2)

    def forward(self, x):
        return self.o(self.r(self.n(self.u(self.d(self.a(x)))).mean(3).permute(2, 0, 1))[0])


def test_the_plan_says_what_every_layer_reads_and_makes():
    plan = sparsebit.prune(Sides().eval(), torch.randn(2, 3, 4, 4), 0.5).pruning_plan
    assert str(plan).splitlines()[:6] == [
        "a  out 8 -> 4",
        "d  8 -> 4",
        "u  in 8 -> 4, out 6 -> 3",
        "n  6 -> 3",
        "r  hidden 10 -> 5, in 6 -> 3",
        "o  in 10 -> 5",
    ]


def test_several_inputs_and_a_target_in_a_tuple_of_their_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.o = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x, scale):
            return self.o(F.relu(self.a(x)) * scale)

    x, scale, y = torch.randn(4, 8), torch.rand(1), torch.zeros(4, dtype=torch.long)
    cut = lambda batch: sparsebit.prune(Two().eval(), (x, scale), 0.5, sparser="taylor", batches=[batch])
    for batch in ((x, scale, y), ({"x": x, "scale": scale}, y)):
        assert cut(batch).a.out_features == 8
    with pytest.raises(CalibrationError, match=r"give \(first, second, target\), or a dict of inputs"):
        cut(((x, scale), y))


# -- multiples of eight by default -----------------------------------------------------------------------
def _widths(net: nn.Module) -> list[int]:
    return [m.out_channels for m in net.modules() if isinstance(m, nn.Conv2d)]


def _stack(*widths: int) -> nn.Module:
    sizes = [3, *widths]
    torch.manual_seed(0)
    layers = [m for a, b in zip(sizes, widths) for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 5)).eval()


def test_pruning_left_widths_that_kernels_do_not_like() -> None:
    net, x = _stack(64, 40, 24), torch.randn(1, 3, 8, 8)
    small = sparsebit.prune(net, x, macs=0.7)
    assert all(width % 8 == 0 for width in _widths(small)) and _widths(small) != [64, 40, 24]
    assert any(width % 8 for width in _widths(sparsebit.prune(net, x, macs=0.7, round_to=1)))


def test_layers_that_are_too_narrow_for_eights_are_still_cut() -> None:
    x = torch.randn(1, 3, 8, 8)
    assert _widths(sparsebit.prune(_stack(12, 32), x, 0.5)) == [6, 16]
    assert _widths(sparsebit.prune(_stack(16, 16), x, 0.25)) == [12, 12]  # eights would keep all of them


def test_a_config_says_what_it_wants() -> None:
    x = torch.randn(1, 3, 8, 8)
    assert _widths(sparsebit.prune(_stack(32, 32), x, 0.3, config={"SPARSER": {"STRATEGY": "l1norm"}})) == [
        23,
        23,
    ]
