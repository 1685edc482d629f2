"""Settings of single layers, sparsers on layers of every kind, rounding, budgets, plans, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.errors import ConfigError
from sparsebit.sparse import SparseModel, parse_sconfig
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
        ({"SPECIFIC": [{"2": ["ROUND_TO", 4]}]}, r"SPECIFIC\[0\]\['2'\]: ROUND_TO is of the whole model"),
        ({"SPECIFIC": [{"2": ["TYPE", "unstructured"]}]}, "TYPE is of the whole model"),
        ({"SPECIFIC": [{"2": ["SCOPE", "global"]}]}, "SCOPE is of the whole model"),
        (
            {"TYPE": "unstructured", "PATTERN": "2:4", "SPECIFIC": [{"2": ["RATIO", 0.0]}]},
            "there is a PATTERN, that says how much goes",
        ),
        (
            {"TYPE": "unstructured", "SPECIFIC": [{"*": ["PATTERN", "2:4"]}, {"2": ["RATIO", 0.3]}]},
            "there is a PATTERN, that says how much goes",
        ),
        (
            {"TYPE": "unstructured", "SPECIFIC": [{"2": ["RATIO", 0.3, "PATTERN", "2:4"]}]},
            "there is a PATTERN, that says how much goes",
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


KINDS = [(s, kind) for s in SPARSERS_MAP if not s.startswith("test") for kind in SPARSERS_MAP[s].KINDS]


@pytest.mark.parametrize("net", [Transposed, Recurrent, ChannelsLast, Beside])
@pytest.mark.parametrize("strategy, kind", KINDS)
def test_every_sparser_on_every_layer(strategy, kind, net):
    model, x, y = net().eval(), torch.randn(6, 3, 8, 8), torch.arange(6) % 4
    first = lambda out: out[0] if isinstance(out, tuple) else out
    smodel = SparseModel(model, {"SPARSER": {"TYPE": kind, "STRATEGY": strategy, "RATIO": 0.5}}, x)
    smodel.calibrate([(x, y)], lambda out, target: F.cross_entropy(first(out), target))
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
