"""Every QModule honours every option of the op it replaces: same float output, and a sane quantized one."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from models import sqnr
from sparsebit.quantization import QuantModel
from sparsebit.quantization.modules import Opr, QuantOpr, find_qmodule

IMAGE, TOKENS = (2, 4, 8, 8), (2, 5, 4)

MODULES = [
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
    (nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular", dilation=2), IMAGE),
    (nn.Conv2d(4, 6, (1, 3), stride=(2, 1), groups=2, bias=False), IMAGE),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2), IMAGE),
    (nn.Linear(4, 3, bias=False), TOKENS),
    (nn.BatchNorm2d(4, affine=False), IMAGE),
    (nn.BatchNorm2d(4, track_running_stats=False), IMAGE),
    (nn.BatchNorm1d(5), TOKENS),
    (nn.LayerNorm((5, 4), eps=0.1, elementwise_affine=False), TOKENS),
    (nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False), IMAGE),
    (nn.AvgPool2d(2, divisor_override=3), IMAGE),
    (nn.AdaptiveAvgPool2d((None, 3)), IMAGE),
    (nn.MaxPool2d(3, stride=2, padding=1, dilation=1, ceil_mode=True), IMAGE),
    (nn.Upsample(size=(5, 7), mode="bilinear", align_corners=True), IMAGE),
    (nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
    (nn.Upsample(scale_factor=2), IMAGE),
    (nn.GELU(approximate="tanh"), TOKENS),
    (nn.LeakyReLU(0.3, inplace=True), TOKENS),
    (nn.ReLU(inplace=True), TOKENS),
    (nn.ReLU6(), TOKENS),
    (nn.Softmax(dim=1), TOKENS),
    (nn.Flatten(0, 1), TOKENS),
    (nn.Sigmoid(), TOKENS),
    (nn.SiLU(), TOKENS),
    (nn.Mish(), TOKENS),
    (nn.Hardsigmoid(), TOKENS),
    (nn.Tanh(), TOKENS),
    (nn.Dropout(0.5), TOKENS),
]

FUNCTIONS = {
    "relu": lambda x: F.relu(input=x),
    "relu6": lambda x: F.relu6(x),
    "leaky_relu": lambda x: F.leaky_relu(x, negative_slope=0.2),
    "silu": lambda x: F.silu(x),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "softmax_kw": lambda x: F.softmax(dim=-1, input=x),
    "softmax_method": lambda x: x.softmax(-1),
    "mean": lambda x: x.mean((1, 2), keepdim=True),
    "torch_mean": lambda x: torch.mean(x),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (1, 1)),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False),
    "interpolate_nearest": lambda x: F.interpolate(x, (3, 3)),
    "add_alpha": lambda x: torch.add(x, x * 2, alpha=3),
    "iadd": lambda x: operator.iadd(x * 1.5, x),
    "sub_mul_div": lambda x: (x - 2) * 3 / 4,
    "floor_div": lambda x: (x * 4) // 2,
    "div_rounding": lambda x: torch.div(x * 10, 3, rounding_mode="floor"),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "cat_default_dim": lambda x: torch.cat([x, x]),
    "flatten": lambda x: x.flatten(1),
    "permute_tuple": lambda x: torch.permute(x, (0, 2, 3, 1)),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose_kw": lambda x: torch.transpose(x, dim0=1, dim1=2),
    "reshape": lambda x: x.reshape(x.shape[0], -1),
    "view_size": lambda x: x.view(x.size(0), x.size()[1], -1),
    "expand_tuple": lambda x: x[:1].expand((2, -1, -1, -1)),
    "expand_as": lambda x: x[:1].expand_as(x),
    "split": lambda x: torch.split(x, 2, dim=1)[1],
    "unbind": lambda x: torch.unbind(x, dim=-1)[2],
    "where": lambda x: torch.where(x == 0, x, x * 2),
    "clone": lambda x: x.clone().contiguous().detach(),
    "shape_arithmetic": lambda x: x.reshape(x.shape[0] * x.shape[1] + 0, -1),
    "not_registered": lambda x: torch.special.bessel_j0(torch.special.airy_ai(x)),
}


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


CASES = [pytest.param(m, s, id=str(m)) for m, s in MODULES]
CASES += [pytest.param(Call(f), IMAGE, id=name) for name, f in FUNCTIONS.items()]


@pytest.mark.parametrize("net, shape", CASES)
def test_float_output_is_kept_and_quantized_output_is_sane(net, shape):
    net = nn.Sequential(net).eval()
    torch.manual_seed(0)
    x = torch.randn(shape)
    want = net(x.clone())
    qmodel = QuantModel(net, {"BACKEND": "virtual", "A": {"QADD": {"ENABLE_QUANT": True}}})
    torch.testing.assert_close(qmodel(x.clone()), want, rtol=1e-5, atol=1e-6)
    qmodel.calibrate([x])
    qmodel.set_quant(True, True)
    got = qmodel(x.clone())
    assert got.shape == want.shape and got.dtype == want.dtype
    if want.unique().numel() > 100:  # rounding functions jump; judge the smooth ones
        assert sqnr(want.float(), got.float()) > 25


def test_embedding_options():
    net = nn.Sequential(nn.Embedding(10, 6, padding_idx=0, max_norm=1.0)).eval()
    index = torch.tensor([[0, 1, 2], [7, 8, 9]])
    want = net(index)
    qmodel = sparsebit.quantize(net, [index])
    assert qmodel.model._0.weight_quantizer.scale.shape == (10,) and qmodel.model._0.input_quantizer is None
    assert sqnr(want, qmodel(index)) > 30


def test_upsample_nearest_needs_no_quantizer_and_interpolation_has_at_least_8_bits():
    cfg = {"BACKEND": "virtual", "A": {"QUANTIZER": {"BIT": 4}}}
    nearest = QuantModel(nn.Sequential(nn.Upsample(scale_factor=2)), cfg).model._0
    linear = QuantModel(nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear")), cfg).model._0
    assert nearest.input_quantizer.absorbed and linear.input_quantizer.bit == 8
    assert isinstance(nearest, sparsebit.quantization.modules.QUpsample)


def test_a_subclass_that_keeps_the_forward_is_found():
    class MyConv(nn.Conv2d):
        pass

    qmodel = QuantModel(nn.Sequential(MyConv(4, 4, 3)), None)
    assert isinstance(qmodel.model._0, sparsebit.quantization.modules.QConv2d)


def test_a_subclass_with_its_own_forward_is_not_mistaken_for_its_base():
    class Scaled(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) * 3

    net, x = nn.Sequential(Scaled(4, 4, 3)).eval(), torch.randn(IMAGE)
    torch.testing.assert_close(QuantModel(net)(x), net(x))


def test_unregistered_ops_stay_float_and_are_named():
    qmodel = QuantModel(nn.Sequential(Call(FUNCTIONS["not_registered"])))
    assert sorted(qmodel.float_ops.values()) == ["special_airy_ai", "special_bessel_j0"]


def test_the_users_own_op():
    """Old style: a class that takes (org_module, config), registered for a module."""
    from sparsebit.quantization.modules import QMODULE_MAP, register_qmodule

    class Square(nn.Module):
        def forward(self, x):
            return x * x

    @register_qmodule(sources=[Square])
    class QSquare(QuantOpr):
        def __init__(self, org_module=None, config=None):
            super().__init__()
            self.cfg = config

        def forward(self, x_in):
            x = self.input_quantizer(x_in)
            return x * x

    try:
        net, x = nn.Sequential(Square()), torch.randn(4, 4)
        qmodel = sparsebit.quantize(net, [x], {"BACKEND": "virtual"})
        assert isinstance(qmodel.model._0, QSquare) and sqnr(net(x), qmodel(x)) > 30
    finally:
        QMODULE_MAP._items.pop(Square)


def test_torchvision_functions_are_found_by_name():
    def stochastic_depth(x):
        return x

    stochastic_depth.__module__ = "torchvision.ops.stochastic_depth"
    stochastic_depth.__qualname__ = "stochastic_depth"
    graph = torch.fx.Graph()
    node = graph.call_function(stochastic_depth, (graph.placeholder("x"),))
    cls = find_qmodule(node, torch.fx.GraphModule({}, graph))
    assert cls is not None and cls.__name__ == "StochasticDepth" and issubclass(cls, Opr)


# -- which tensors a call quantizes --------------------------------------------------------------------
def inputs_of(qmodel, name):
    """What feeds the node `name`, each by the name of its own node."""
    node = next(n for n in qmodel.model.graph.nodes if n.name == name)
    return [arg.name for arg in node.all_input_nodes]


def quantized(function, *shapes, config=None):
    """A model of `function`, quantized, with its float inputs: all that a call needs."""
    inputs = [torch.randn(shape) for shape in shapes]
    net = (Call if len(shapes) == 1 else Call2)(function)
    qmodel = QuantModel(net, config or {"BACKEND": "virtual", "A": {"QADD": {"ENABLE_QUANT": True}}})
    qmodel.calibrate([tuple(inputs)])
    qmodel.set_quant(True, True)
    return qmodel, inputs, net(*inputs)


class Call2(Call):
    def forward(self, x, y):
        return self.function(x, y)


@pytest.mark.parametrize(
    "function, name, want",
    [
        (lambda x, y: torch.addmm(x, x, y), "addmm", ["x", "addmm_identity0", "addmm_identity1"]),
        (
            lambda x, y: torch.addmm(input=y, mat2=y, mat1=x),
            "addmm",
            ["y", "addmm_identity1", "addmm_identity0"],
        ),
        (
            lambda x, y: F.linear(x, y * 2, y[0] * 3),
            "linear",
            ["linear_identity0", "linear_identity1", "mul_1"],
        ),
        (lambda x, y: F.embedding(x.abs().long(), y * 2), "embedding", ["long", "embedding_identity0"]),
        (lambda x, y: x + x.size(0), "add", ["x", "size"]),
        (lambda x, y: torch.einsum("ij,jk", x, y), "einsum", ["einsum_identity0", "einsum_identity1"]),
    ],
)
def test_only_the_factors_of_a_product_are_quantized(function, name, want):
    qmodel, _, _ = quantized(function, (4, 4), (4, 4))
    assert inputs_of(qmodel, name) == want


def test_the_mask_of_attention_is_never_quantized():
    def attention(x, y):
        mask = y[:, :1].expand(-1, 5, -1)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, dropout_p=0.0)

    qmodel, _, _ = quantized(attention, (2, 5, 5), (2, 5, 5))
    assert inputs_of(qmodel, "scaled_dot_product_attention") == [
        "scaled_dot_product_attention_identity0",
        "expand",
    ]


@pytest.mark.parametrize("hidden", [float("-inf"), -1e9, -100.0])
def test_a_mask_in_front_of_a_softmax_costs_no_precision(hidden):
    """A grid that reaches down to the mask would make all other logits equal."""
    visible = torch.arange(6) < 4

    def masked(x):
        return torch.softmax(x * 3 + torch.where(visible, 0.0, hidden), -1)

    qmodel, (x,), want = quantized(masked, (3, 5, 6))
    got = qmodel(x)
    assert list(dict(qmodel.named_quantizers())) == ["softmax.input_quantizer"]
    assert got[..., 4:].abs().max() < 1e-5 and (got - want).abs().max() < 0.03
    torch.testing.assert_close(
        qmodel.model.softmax.input_quantizer.observer.max_val, (x[..., :4] * 3).amax().reshape(1)
    )


def test_the_input_is_found_by_its_keyword_and_the_tensors_of_a_list_share_a_grid():
    class Mixed(QuantOpr):
        def forward(self, *args, **kwargs):
            return self.quantize_first(args, kwargs), kwargs

    op, seen = Mixed(), []
    op.input_quantizer = lambda v: seen.append(v) or -v
    x, y = torch.ones(2), torch.zeros(2)
    for call in ({"weight": y, "input": x}, {"dim": 1, "x": x}, {"x": x, "y": y}):
        _, kwargs = op(**call)
        assert kwargs["input" if "input" in call else "x"].equal(-x) and seen.pop() is x and not seen
    assert op(tensors=[x, y])[1]["tensors"][0].equal(-x) and len(seen) == 2
    (first, second), _ = op((x, y), 3)
    assert type(first) is tuple and first[1].equal(-y) and second == 3


@pytest.mark.parametrize(
    "kind", ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "ReLU6", "InstanceNorm2d", "ZeroPad2d"]
)
def test_subclasses_of_classes_that_inherit_their_forward_are_found(kind):
    base = getattr(nn, kind)
    sub = type("Mine", (base,), {"__module__": "theirs"})
    made = QuantModel(nn.Sequential(sub() if kind == "ReLU6" else sub(4))).model._0
    plain = QuantModel(nn.Sequential(base() if kind == "ReLU6" else base(4))).model._0
    assert type(made) is type(plain)
