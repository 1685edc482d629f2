"""Functions with constant weights become modules that hold those weights; computed weights are folded first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.graph.passes import run_passes
from sparsebit.graph.simplify.fold_constants import fold_constants
from sparsebit.graph.simplify.functions_to_modules import functions_to_modules
from sparsebit.graph.trace.from_module import trace
from sparsebit.graph.trace.tracer import LeafTracer

PASSES = [fold_constants, functions_to_modules]


class Fn(nn.Module):
    """`function(self, *inputs)` with a few parameters `w`, `b`, ... and buffers."""

    def __init__(self, function, buffers=(), **tensors: Tensor):
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            if name in buffers:
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def converted(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The model through both passes; the output must stay what the model computes."""
    model.eval()
    gm = trace(model, LeafTracer())
    run_passes(gm, PASSES)
    torch.testing.assert_close(gm(*inputs), model(*inputs), rtol=1e-6, atol=1e-6)
    return gm


def modules(gm: fx.GraphModule) -> list[nn.Module]:
    return [gm.get_submodule(n.target) for n in gm.graph.nodes if n.op == "call_module"]


def paths(gm: fx.GraphModule) -> list[str]:
    return [n.meta["path"] for n in gm.graph.nodes if n.op == "call_module"]


X2, X4 = rand(3, 8), rand(2, 6, 9, 9)
FORMS = {
    "linear": (lambda m, x: F.linear(x, m.w, m.b), X2, nn.Linear, {"w": rand(5, 8), "b": rand(5)}),
    "linear keywords": (
        lambda m, x: F.linear(bias=None, weight=m.w, input=x),
        X2,
        nn.Linear,
        {"w": rand(5, 8)},
    ),
    "conv1d": (lambda m, x: F.conv1d(x, m.w, None, 2, 1), rand(2, 4, 9), nn.Conv1d, {"w": rand(5, 4, 3)}),
    "conv2d": (
        lambda m, x: torch.conv2d(x, m.w, m.b, (2, 1), [1], dilation=2, groups=3),
        X4,
        nn.Conv2d,
        {"w": rand(9, 2, 3, 2), "b": rand(9)},
    ),
    "conv2d same": (lambda m, x: F.conv2d(x, m.w, padding="same"), X4, nn.Conv2d, {"w": rand(5, 6, 4, 3)}),
    "conv3d": (lambda m, x: F.conv3d(x, m.w), rand(1, 2, 4, 5, 6), nn.Conv3d, {"w": rand(3, 2, 2, 3, 1)}),
    "conv_transpose1d": (
        lambda m, x: F.conv_transpose1d(x, m.w, m.b, 3, 1, 2),
        rand(2, 4, 9),
        nn.ConvTranspose1d,
        {"w": rand(4, 5, 4), "b": rand(5)},
    ),
    "conv_transpose2d": (
        lambda m, x: F.conv_transpose2d(x, m.w, stride=2, output_padding=1, groups=2, dilation=(1, 2)),
        X4,
        nn.ConvTranspose2d,
        {"w": rand(6, 2, 3, 3)},
    ),
    "layer_norm": (
        lambda m, x: F.layer_norm(x, (8,), m.w, m.b, 0.1),
        X2,
        nn.LayerNorm,
        {"w": rand(8), "b": rand(8)},
    ),
    "layer_norm no bias": (lambda m, x: F.layer_norm(x, [8], m.w), X2, nn.LayerNorm, {"w": rand(8)}),
    "torch.layer_norm": (
        lambda m, x: torch.layer_norm(x, [8], m.w, m.b),
        X2,
        nn.LayerNorm,
        {"w": rand(8), "b": rand(8)},
    ),
    "rms_norm": (lambda m, x: F.rms_norm(x, [8], m.w, 0.3), X2, nn.RMSNorm, {"w": rand(8)}),
    "group_norm": (
        lambda m, x: F.group_norm(x, 3, m.w, m.b, eps=0.2),
        X4,
        nn.GroupNorm,
        {"w": rand(6), "b": rand(6)},
    ),
    "prelu": (lambda m, x: F.prelu(x, m.w), X4, nn.PReLU, {"w": rand(6)}),
    "prelu method": (lambda m, x: x.prelu(m.w), X4, nn.PReLU, {"w": rand(1)}),
    "bilinear": (
        lambda m, x: F.bilinear(x, x + 1, m.w, m.b),
        X2,
        nn.Bilinear,
        {"w": rand(3, 8, 8), "b": rand(3)},
    ),
    "matmul": (lambda m, x: torch.matmul(x, m.w), rand(2, 3, 8), nn.Linear, {"w": rand(8, 5)}),
    "@": (lambda m, x: x @ m.w, rand(8), nn.Linear, {"w": rand(8, 5)}),
    "mm keyword": (lambda m, x: torch.mm(x, mat2=m.w), X2, nn.Linear, {"w": rand(8, 5)}),
    "mm method": (lambda m, x: x.mm(m.w), X2, nn.Linear, {"w": rand(8, 5)}),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), X2, nn.Linear, {"w": rand(8, 5), "b": rand(5)}),
    "addmm keywords": (
        lambda m, x: torch.addmm(input=m.b, mat1=x, mat2=m.w, alpha=1),
        X2,
        nn.Linear,
        {"w": rand(8, 5), "b": rand(5)},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    function, x, cls, tensors = FORMS[name]
    (module, *rest) = modules(converted(Fn(function, **tensors), x))
    assert type(module) is cls and not rest
    assert all(p.requires_grad and not p.is_meta for p in module.parameters())
    assert len(list(module.parameters())) == len(tensors)


def test_embedding_options():
    ids = torch.tensor([[1, 4, 0], [4, 4, 2]])
    table = Fn(lambda m, x: F.embedding(x, m.w, padding_idx=0, scale_grad_by_freq=True), w=rand(5, 3))
    (module,) = modules(converted(table, ids))
    assert type(module) is nn.Embedding and module.padding_idx == 0 and module.scale_grad_by_freq
    bag = Fn(lambda m, x: F.embedding_bag(x, m.w, mode="max"), w=rand(5, 3))
    (module,) = modules(converted(bag, ids))
    assert type(module) is nn.EmbeddingBag and module.mode == "max"


def test_batch_norm_with_the_statistics_of_eval_mode():
    stats = {"mean": rand(5), "var": rand(5).abs() + 0.5, "w": rand(5), "b": rand(5), "k": rand(5, 6, 3, 3)}

    def net(training):
        function = lambda m, x: F.batch_norm(
            F.conv2d(x, m.k), m.mean, m.var, m.w, m.b, training=training, momentum=0.3, eps=0.2
        )
        return Fn(function, buffers=("mean", "var"), **{k: v.clone() for k, v in stats.items()})

    _, bn = modules(converted(net(False), X4))
    assert type(bn) is nn.BatchNorm2d and (bn.eps, bn.momentum) == (0.2, 0.3) and not bn.training
    gm = trace(net(True), LeafTracer())
    run_passes(gm, PASSES)
    assert [type(m) for m in modules(gm)] == [nn.Conv2d]  # this one updates its statistics: left alone


def test_rank_unknown_is_declined():
    net = Fn(
        lambda m, x: F.batch_norm(x * 2, m.mean, m.var), ("mean", "var"), mean=rand(6), var=torch.ones(6)
    )
    assert not modules(converted(net, X4))


def test_instance_norm():
    net = Fn(
        lambda m, x: F.instance_norm(F.max_pool2d(x, 2), weight=m.w, bias=m.b, eps=0.1), w=rand(6), b=rand(6)
    )
    (module,) = modules(converted(net, X4))
    assert type(module) is nn.InstanceNorm2d and module.affine and not module.track_running_stats


# -- which parameters ---------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(rand(7, 4))
        self.frozen = nn.Parameter(rand(4), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.layer_norm(F.embedding(ids, self.table), [4], self.frozen)
        return F.linear(x, self.table) + x @ self.table.t()


def test_tied_weights_stay_tied_and_requires_grad_is_kept():
    gm = converted(Tied(), torch.arange(7))
    embedding, norm, linear, product = modules(gm)
    assert embedding.weight is linear.weight is product.weight and embedding.weight.requires_grad
    assert not norm.weight.requires_grad
    assert len(list(gm.parameters())) == 2


@pytest.mark.parametrize(
    "turn",
    [
        lambda w: w.t(),
        lambda w: w.T,
        lambda w: w.transpose(0, 1),
        lambda w: w.transpose(-1, 0),
        lambda w: w.permute(1, 0),
    ],
)
def test_a_product_with_the_transpose_holds_the_parameter_itself(turn):
    net = Fn(lambda m, x: x @ turn(m.w), w=rand(5, 8))
    gm = trace(net, LeafTracer())
    parameter = gm.w
    run_passes(gm, PASSES)
    (linear,) = modules(gm)
    assert linear.weight is parameter
    torch.testing.assert_close(gm(X2), net(X2))


def test_a_permute_that_moves_nothing_is_no_transpose():
    (linear,) = modules(converted(Fn(lambda m, x: x @ m.w.permute(0, 1), w=rand(8, 8)), X2))
    assert linear.weight.shape == (8, 8)


def test_a_weight_that_others_read_is_not_transposed():
    net = Fn(lambda m, x: x @ m.w + m.w.sum(), w=rand(8, 5))
    assert not modules(converted(net, X2))


def test_two_products_with_one_weight_share_one_module():
    gm = converted(Fn(lambda m, x: (x @ m.w) @ m.w, w=rand(8, 8)), X2)
    first, second = modules(gm)
    assert first is second


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x, x),  # no constant
        lambda m, x: m.w.t() @ x.t(),  # constant on the left
        lambda m, x: torch.addmm(m.b, x, m.w, alpha=2),
        lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5),
        lambda m, x: F.layer_norm(x, x.shape[1:]),
        lambda m, x: F.layer_norm(x, [x.size(1)], m.v),  # not static
        lambda m, x: F.conv2d(x[None, None], m.k, padding=4, stride=x.size(0)),
        lambda m, x: torch.matmul(x, m.k),  # 4-D
    ],
)
def test_declined(function):
    net = Fn(function, w=rand(8, 5), b=rand(5), v=rand(8), k=rand(1, 1, 8, 2))
    assert not modules(converted(net, X2))


def test_a_buffer_becomes_a_parameter_without_grad():
    (linear,) = modules(converted(Fn(lambda m, x: F.linear(x, m.w), ("w",), w=rand(5, 8)), X2))
    assert isinstance(linear.weight, nn.Parameter) and not linear.weight.requires_grad


# -- names --------------------------------------------------------------------------------------------
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.up_weight, self.odd = (nn.Parameter(rand(8, 8) + i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(F.linear(x, self.weight), self.up_weight), self.odd)


def test_paths_are_where_the_parameter_sits():
    gm = trace(nn.Sequential(Gate(), nn.Sequential(Gate())), LeafTracer())
    run_passes(gm, PASSES)
    assert paths(gm) == ["0", "0.up", "0.odd", "1.0", "1.0.up", "1.0.odd"]


def test_the_weight_of_a_layer_that_is_called_itself():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(7, 4)

        def forward(self, ids):
            return F.linear(self.emb(ids), self.emb.weight)

    gm = converted(Net(), torch.arange(3))
    assert paths(gm) == ["emb", "linear"]
    first, second = modules(gm)
    assert first.weight is second.weight


# -- computed weights ---------------------------------------------------------------------------------
class StdConv2d(nn.Conv2d):
    """Weight standardisation (https://arxiv.org/abs/1903.10520), written with batch_norm as timm does."""

    def forward(self, x: Tensor) -> Tensor:
        w = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=1e-6)
        return F.conv2d(x, w.reshape_as(self.weight), self.bias, padding=self.padding)


def test_weight_standardisation_is_folded():
    torch.manual_seed(0)
    conv = StdConv2d(6, 4, 3, padding=1)
    gm = converted(nn.Sequential(conv, nn.ReLU()), X4)
    folded = modules(gm)[0]
    assert type(folded) is nn.Conv2d and folded.weight.requires_grad
    rows = folded.weight.flatten(1)
    torch.testing.assert_close(rows.mean(1), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(rows.std(1, unbiased=False), torch.ones(4), atol=1e-3, rtol=0)
    assert paths(gm)[0] == "0"


def test_a_folded_weight_is_trainable_like_what_it_is_made_from():
    net = Fn(
        lambda m, x: F.linear(x, m.w * m.s.exp(), m.b.to(torch.float32)),
        w=rand(5, 8),
        s=rand(5, 1),
        b=rand(5),
    )
    net.b.requires_grad_(False)
    (linear,) = modules(converted(net, X2))
    assert linear.weight.requires_grad and not linear.bias.requires_grad
    torch.testing.assert_close(linear.weight, net.w * net.s.exp())


def test_only_weights_are_folded():
    net = Fn(lambda m, x: x * (m.w * 2), w=rand(8))
    gm = trace(net, LeafTracer())
    assert fold_constants(gm) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x, m.w + torch.randn_like(m.w)),  # random
        lambda m, x: F.linear(x, F.dropout(m.w, 0.5, True)),
        lambda m, x: F.linear(x, m.v.expand(500, 8)),  # a large value made of a small one
        lambda m, x: F.linear(x, m.w * x.mean()),  # depends on the input
    ],
)
def test_not_folded(function):
    gm = trace(Fn(function, w=rand(5, 8), v=rand(1, 8)), LeafTracer())
    run_passes(gm, PASSES)
    assert not modules(gm)


def test_what_the_forward_writes_to_is_no_constant():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(rand(5, 8))
            self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, x):
            self.scale.add_(1.0)
            return F.linear(x, self.w * self.scale)

    gm = trace(Counting(), LeafTracer())
    run_passes(gm, PASSES)
    assert not modules(gm)
    assert not torch.equal(gm(X2), gm(X2))


def test_the_users_model_is_not_touched():
    model = Fn(lambda m, x: F.linear(x, m.w.t()), w=rand(8, 5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gm = converted(model, X2)
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter.zero_()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
