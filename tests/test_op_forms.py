"""Every op in every call form: builds, keeps the float output, calibrates, quantizes within a sane error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from op_forms import FORMS, NAMES, Form
from op_options import Generated, Op, calls
from sparsebit.quantization import QuantModel
from sparsebit.quantization.modules import QMODULE_MAP, is_known, qmodule_of

CONFIG = {"BACKEND": "virtual", "A": {"QADD": {"ENABLE_QUANT": True}}}
ERROR = 0.06  # of 8-bit values, relative to the output


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than these tiny ops."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(model: nn.Module, args: tuple[Any, ...]) -> Any:
    """The output; inputs are copied, random ops draw the same numbers each time."""
    args = pytree.tree_map_only(Tensor, torch.clone, args)
    torch.default_generator.manual_seed(7)  # torch.manual_seed asks every kind of device
    with torch.no_grad():
        return model(*args)


def same(got: Any, want: Any, close: float | None = 1e-5) -> None:
    """Same structure, types and shapes; float tensors agree to `close`, or within ERROR of their size."""
    got_leaves, got_tree = pytree.tree_flatten(got)
    want_leaves, want_tree = pytree.tree_flatten(want)
    assert got_tree == want_tree
    for g, w in zip(got_leaves, want_leaves):
        assert type(g) is type(w)
        if not isinstance(w, Tensor):
            assert g == w
            continue
        assert g.shape == w.shape and g.dtype == w.dtype
        if close is not None:
            torch.testing.assert_close(g, w, rtol=close, atol=close, equal_nan=True)
        elif w.is_floating_point() and w.numel():
            error, size = (g - w).double().nan_to_num().norm(), w.double().nan_to_num().norm()
            assert error <= ERROR * size + 1e-6, f"relative error {error / size:.3f}"


def check(model: nn.Module, batches: list[tuple[Any, ...]], config: Any = None) -> QuantModel:
    """What every form promises; returns the quantized model."""
    before, x = copy.deepcopy(model.state_dict()), batches[0]
    qmodel = QuantModel(model, config or CONFIG)
    want = run(copy.deepcopy(model), x)  # a table with max_norm changes itself
    same(run(qmodel, x), want)
    qmodel.calibrate(copy.deepcopy(batches))  # a form may write into its inputs
    same(run(qmodel, x), want)
    qmodel.set_quant(w_quant=True, a_quant=True)
    same(run(qmodel, x), want, close=None)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"the user's {name} changed"
    return qmodel


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.text)
def test_form(form: Form) -> None:
    qmodel = check(form.model(), [form.batch(seed) for seed in range(2)])
    assert bool(qmodel.float_ops) == form.stays, qmodel.float_ops
    names = [name for name, _ in qmodel.named_quantizers()]
    assert len(names) == form.quantizers, names


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls(), st.booleans())
def test_generated_forms(call: tuple[Op, tuple[Any, ...], dict[str, Any]], by_keyword: bool) -> None:
    """Random call forms, from torch's own signatures."""
    op, batches = call[0], []
    for seed in range(3):
        torch.manual_seed(seed)
        batches.append((torch.randn(op.shape),))
    try:
        model = Generated(*call, by_keyword).eval()
        run(model, batches[0])
    except (TypeError, ValueError, RuntimeError, IndexError):
        reject()  # torch refuses these options together
    qmodel = check(model, batches)
    if qmodel.float_ops:  # an in-place layer that is called by keyword stays in place
        assert call[2].get("inplace") or True in call[1], qmodel.float_ops
    else:
        assert op.quantizers in (-1, len(list(qmodel.named_quantizers())))


# -- nothing of torch is forgotten -------------------------------------------------------------------
NO_LAYERS = """
AdaptiveLogSoftmaxWithLoss Container DataParallel Module ModuleDict ModuleList ParameterDict ParameterList
RNNBase RNNCellBase Sequential"""  # abstract, containers, or made of layers
NO_OPS = """assert_int_or_pair boolean_dispatch handle_torch_function has_torch_function has_torch_function_unary
has_torch_function_variadic grouped_mm scaled_grouped_mm scaled_mm
upsample upsample_nearest upsample_bilinear"""  # helpers; what is traced as other ops; fp8


def test_every_layer_of_torch_is_known():
    layers = {n: c for n, c in vars(nn).items() if isinstance(c, type) and issubclass(c, nn.Module)}
    missing = {n for n, c in layers.items() if qmodule_of(c) is None and "Lazy" not in n}
    assert missing <= set(NO_LAYERS.split())


def test_every_function_of_torch_nn_functional_is_known():
    functions = {n: f for n, f in vars(F).items() if callable(f) and not isinstance(f, type)}
    public = {
        n
        for n, f in functions.items()
        if not n.startswith("_") and not n.endswith("_") and f not in QMODULE_MAP
    }
    assert public - {"Callable", "Optional"} <= set(NO_OPS.split())


# -- the defects of the original ---------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("d, shape", [(1, (2, 4, 9)), (2, (2, 4, 9, 7)), (3, (1, 4, 5, 6, 7))])
def test_D7_padding_mode_of_convolutions(d, shape, mode):
    conv, x = getattr(nn, f"Conv{d}d")(4, 6, 3, padding=1, padding_mode=mode), torch.randn(shape)
    padded = F.pad(x, [1] * (2 * d), mode="constant" if mode == "zeros" else mode)
    want = getattr(F, f"conv{d}d")(padded, conv.weight, conv.bias)
    qmodel = QuantModel(nn.Sequential(conv).eval())
    same(run(qmodel, (x,)), want.detach())
    qmodel.calibrate([x])
    qmodel.set_quant(True, True)
    same(run(qmodel, (x,)), want.detach(), close=None)


def test_D8_options_of_pools_upsample_and_gelu():
    x, image = torch.randn(2, 3), torch.randn(1, 2, 4, 4)
    float_of = lambda layer, value: run(QuantModel(nn.Sequential(layer).eval()), (value,))
    corner = lambda **options: float_of(nn.AvgPool2d(2, padding=1, **options), image)[0, 0, 0, 0]
    torch.testing.assert_close(corner(), image[0, 0, 0, 0] / 4)
    torch.testing.assert_close(corner(count_include_pad=False), image[0, 0, 0, 0])
    torch.testing.assert_close(corner(divisor_override=2), image[0, 0, 0, 0] / 2)
    for aligned in (True, False):  # with aligned corners the last value is the last of the input
        up = float_of(nn.Upsample(size=(7, 7), mode="bilinear", align_corners=aligned), image)
        middle = (up[..., 0, 1] - (image[..., 0, 0] + image[..., 0, 1]) / 2).abs().max() < 1e-6
        assert up.shape == (1, 2, 7, 7) and bool(middle) == aligned
    tanh = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    torch.testing.assert_close(float_of(nn.GELU("tanh"), x), tanh)
    torch.testing.assert_close(float_of(nn.GELU(), x), x * (1 + torch.erf(x / 2**0.5)) / 2)
    values, indices = float_of(nn.MaxPool2d(2, return_indices=True), image)
    torch.testing.assert_close(values, image.flatten(2).gather(2, indices.flatten(2)).view_as(values))


D35 = """
F.relu6(x); F.leaky_relu(x); F.silu(x); F.mish(x); F.hardsigmoid(x); torch.flatten(x); x.mean(); torch.mean(x, 1)
torch.cat([x, x]); x.permute((0, 2, 1)); torch.permute(x, (0, 2, 1)); torch.transpose(x, dim0=1, dim1=2); x.unbind()
x.unbind(-1); x[:1].expand((2, 5, 6)); torch.add(x, x, alpha=2); torch.div(x, 2, rounding_mode="floor")
x.reshape(x.shape); x.to(x.dtype); x[:, : x.size(1) // 2]; nn.Softmax(dim=-1); nn.Linear(6, 2) | m(input=x)
"""


@pytest.mark.parametrize("text", D35.strip().replace("\n", "; ").split("; "))
def test_D35_op_forms(text):
    form = Form(text, ((2, 5, 6),), -1)
    assert check(form.model(), [form.batch(0)]).float_ops == {}


D36 = """
nn.Conv1d(5, 2, 1); nn.Hardswish(); nn.PReLU(); nn.ELU(); nn.GroupNorm(5, 5); nn.InstanceNorm1d(5)
F.dropout(x, training=False); nn.Dropout2d(); nn.AdaptiveMaxPool1d(2); F.conv1d(x, w[:, :1].repeat(1, 5)[:, :, None])
F.linear(x, w.repeat(1, 2)[:, :6]); F.layer_norm(x, (6,)); nn.ConstantPad1d(1, 0.0); F.pad(x, (1, 1))
F.scaled_dot_product_attention(x, x, x); torch.softmax(x, 1); torch.tanh(x); torch.exp(x); torch.sqrt(x.abs())
torch.sub(x, 1); torch.bmm(x, x.mT); x ** 2; -x; x.unsqueeze(0); x.squeeze(); x.chunk(2); x.split(2); x.add(1)
x.mul(2); x.matmul(x.transpose(1, 2)); F.max_pool1d(x, 2); F.avg_pool1d(x, 2); MyRelu()
"""


@pytest.mark.parametrize("text", D36.strip().replace("\n", "; ").split("; "))
def test_D36_missing_ops(text):
    test_D35_op_forms(text)


@pytest.mark.parametrize(
    "text", ["nn.Conv3d(4, 4, 1)", "F.avg_pool3d(x, 2)", "nn.LSTM(6, 4)", "nn.MultiheadAttention(6, 2)"]
)
def test_D36_missing_layers_are_known(text):
    layer = eval(text.partition("(")[0], NAMES)
    assert is_known(layer)
