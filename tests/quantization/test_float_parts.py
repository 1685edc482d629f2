"""Where a quantizer would only do harm: sums that a norm reads, rows that are masked altogether, zero padding; and
the experts of a mixture, which are quantized like any other layer."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from models import sqnr
from sparsebit.graph.export.experts import grouped_mm
from sparsebit.quantization import QuantModel
from sparsebit.quantization.analysis.costs import macs_quantized

QADD = {"BACKEND": "virtual", "A": {"QADD": {"ENABLE_QUANT": True}}}


class Call(nn.Module):
    def __init__(self, function, **layers):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args):
        return self.function(self, *args)


# -- sums ----------------------------------------------------------------------------------------------
def sums(net):
    qmodel = QuantModel(net.eval(), QADD, example=torch.randn(2, 4, 8))
    assert not qmodel.islands
    return {name for name, _ in qmodel.named_quantizers() if "add" in name}


def fc(**more):
    return {"fc": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "conv": nn.Conv1d(4, 4, 1), **more}


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.norm(x + m.fc(x)),
        lambda m, x: m.norm((x + m.fc(x)).view(-1, 8)),
        lambda m, x: F.layer_norm((x + 0.5 * m.fc(x)) + x, [8]),  # both: the first sum is part of the second
        lambda m, x: m.fc((s := x + m.fc(x)) * torch.rsqrt(s.pow(2).mean(-1, keepdim=True))),  # by hand
        lambda m, x: m.norm((s := x + m.fc(x)) + m.fc(m.norm(s))),  # norm first
    ],
)
def test_a_sum_that_a_norm_reads_is_added_in_float(forward):
    assert not sums(Call(forward, **fc()))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.fc(x + m.fc(x)),
        lambda m, x: m.norm(m.fc(x + m.fc(x))),
        lambda m, x: m.norm(x + m.conv(x)),  # else onnxruntime convolves in float
        lambda m, x: m.norm((x + m.conv(x).relu().transpose(0, 1).transpose(0, 1)).flatten(1).view(2, 4, 8)),
    ],
)
def test_other_sums_are_quantized(forward):
    assert sums(Call(forward, **fc())) == {"add_identity0.input_quantizer", "add_identity1.input_quantizer"}


def test_a_small_class_token_beside_large_patches_survives():
    """The sum is read by a norm, which makes both equally large."""
    net = Call(lambda m, x: m.norm(x + m.fc(x)), fc=nn.Linear(8, 8, bias=False), norm=nn.LayerNorm(8))
    x = torch.randn(4, 16, 8) * 100
    x[:, 0] /= 2000
    net.fc.weight.data.mul_(0.01)
    qmodel = sparsebit.quantize(net.eval(), [x], QADD)
    with torch.no_grad():
        assert sqnr(net(x)[:, 0], qmodel(x)[:, 0]) > 25


# -- softmax -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, float("-inf"), -1e9])
def test_rows_that_are_masked_altogether_do_not_stretch_the_grid(value):
    torch.manual_seed(0)
    x, mask = torch.randn(4, 6, 6) * 3, torch.zeros(4, 6, 6, dtype=torch.bool)
    mask[:, 4:], mask[:, :, 4:] = True, True  # padding, as queries and as keys: DeBERTa
    net = Call(lambda m, x, mask: x.masked_fill(mask, value).softmax(-1))
    qmodel = sparsebit.quantize(net, [(x, mask)], {"BACKEND": "virtual"})
    assert qmodel.model.softmax.input_quantizer.scale.item() * 255 < 40
    assert sqnr(net(x, mask)[:, :4], qmodel(x, mask)[:, :4]) > 25
    if value != float("-inf"):
        torch.testing.assert_close(qmodel(x, mask)[:, 4:], torch.full((4, 2, 6), 1 / 6))


def test_equal_values_that_are_no_mask_are_part_of_the_range():
    x = torch.full((2, 5), 7.0)
    qmodel = sparsebit.quantize(Call(lambda m, x: x.softmax(-1)), [x], {"BACKEND": "virtual"})
    assert qmodel.model.softmax.input_quantizer.scale.item() * 255 == pytest.approx(7, rel=1e-3)


# -- experts -------------------------------------------------------------------------------------------
OFFS = torch.tensor([3, 3, 7, 9], dtype=torch.int32)  # the second expert gets nothing


def looped(x, weight, offs):
    out, start = torch.zeros(len(x), weight.shape[2]), 0
    for i, end in enumerate(offs.tolist()):
        out[start:end] = x[start:end] @ weight[i]
        start = end
    return out


FORMS = {
    "torch": lambda m, x, offs: torch._grouped_mm(x, m.weight.transpose(-2, -1), offs),
    "F": lambda m, x, offs: F.grouped_mm(x, m.weight.transpose(-2, -1), offs=offs),
    "keywords": lambda m, x, offs: F.grouped_mm(mat_b=m.weight.transpose(-2, -1), mat_a=x, offs=offs),
}


def test_grouped_mm():
    x, weight = torch.randn(10, 16), torch.randn(4, 16, 12)  # the last row belongs to no expert
    torch.testing.assert_close(grouped_mm(x, weight, OFFS), looped(x, weight, OFFS))


HAS_GROUPED_MM = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no F.grouped_mm")


@HAS_GROUPED_MM
@pytest.mark.parametrize("form", FORMS)
def test_experts_have_a_scale_for_each_row_of_each_expert(form):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 12, 16) * torch.tensor([1.0, 10, 100, 0.1]).view(4, 1, 1))
    net, x = Call(FORMS[form], weight=weight).eval(), torch.randn(9, 16)
    want = looped(x, weight.detach().transpose(1, 2), OFFS)
    qmodel = QuantModel(net, {"BACKEND": "virtual"}, example=(x, OFFS))
    with torch.no_grad():
        torch.testing.assert_close(qmodel(x, OFFS), want, rtol=1e-5, atol=1e-4)
        qmodel.calibrate([(x, OFFS)])
        qmodel.set_quant(True, True)
        got = qmodel(x, OFFS)
    weights = [q for name, q in qmodel.named_quantizers() if name.endswith("weight_quantizer")]
    assert [q.scale.numel() for q in weights] == [4 * 12]
    for start, end in ((0, 3), (3, 7), (7, 9)):
        assert 30 < sqnr(want[start:end], got[start:end]) < 60
    assert macs_quantized(qmodel, (x, OFFS)) == (9 * 12 * 16, 9 * 12 * 16)


@HAS_GROUPED_MM
def test_experts_whose_weight_is_computed():
    net = Call(lambda m, x, w, offs: F.grouped_mm(x, w, offs=offs))
    x, w = torch.randn(9, 16), torch.randn(4, 16, 12)
    qmodel = sparsebit.quantize(net, [(x, w, OFFS)], {"BACKEND": "virtual"})
    names = {name for name, _ in qmodel.named_quantizers()}
    assert names == {f"_grouped_mm_identity{i}.input_quantizer" for i in (0, 1)}
    assert 30 < sqnr(net(x, w, OFFS), qmodel(x, w, OFFS)) < 60


# -- small things --------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [False, True])
def test_bias_correction_leaves_padding_at_zero(bias):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8, bias=bias)).eval()
    x = torch.rand(4, 6, 16)
    x[:, 4:] = 0
    qmodel = sparsebit.quantize(
        net,
        [x],
        {"BACKEND": "virtual", "W": {"QUANTIZER": {"BIT": 3}}, "SCHEDULE": {"BIAS_CORRECTION": True}},
    )
    corrected = qmodel.model._0.bias_correction.abs().sum() > 0
    assert corrected == bias
    if not bias:
        assert not qmodel(x)[:, 4:].any()


def test_a_model_that_sees_only_integers_warns(caplog):
    net, x = Call(lambda m, x: x.softmax(-1, dtype=torch.float32)), torch.arange(12).view(3, 4)
    with caplog.at_level(logging.WARNING, logger="sparsebit"):
        qmodel = sparsebit.quantize(net, [x], {"BACKEND": "virtual"})
    assert "softmax.input_quantizer saw no floating-point data" in caplog.text
    torch.testing.assert_close(qmodel(x), net(x))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("trace", ["fx", "export"])
def test_weights_that_a_hook_computes_are_quantized(norm, trace):
    torch.manual_seed(0)
    net, x = nn.Sequential(norm(nn.Linear(8, 6)), norm(nn.Conv1d(4, 5, 1))).eval(), torch.randn(3, 4, 8)
    net[0].bias.data.add_(1)
    want, state = net(x).detach(), set(net.state_dict())
    qmodel = QuantModel(net, {"BACKEND": "virtual"}, example=x, trace=trace).calibrate([x])
    torch.testing.assert_close(qmodel(x), want, rtol=1e-5, atol=1e-6)
    assert len([n for n, _ in qmodel.named_quantizers() if n.endswith("weight_quantizer")]) == 2
    qmodel.set_quant(True, True)
    assert sqnr(want, qmodel(x)) > 25
    assert set(net.state_dict()) == state and torch.equal(net(x), want)  # the user's model keeps its hooks


# -- attention -----------------------------------------------------------------------------------------
def test_every_product_of_a_fused_attention_counts_as_quantized():
    """Values wider than queries: torch multiplies step by step then, and inside that op nothing is on a grid."""
    net = Call(lambda m, q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask))
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 16)
    batch = (q, k, v, torch.randn(5, 7))
    qmodel = sparsebit.quantize(net, [batch], {"BACKEND": "virtual"})
    assert macs_quantized(qmodel, batch) == (6 * 5 * 7 * (8 + 16),) * 2
    qmodel.set_quant(False, False)
    torch.testing.assert_close(qmodel(*batch), net(*batch))
