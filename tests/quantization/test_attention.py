"""Attention and transformer layers against torch's own modules: every option, then calibrated and quantized."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparsebit
from models import sqnr
from sparsebit.errors import SparsebitError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.modules.composite.attention import (
    QMultiheadAttention,
    QTransformerDecoderLayer,
    QTransformerEncoder,
    QTransformerEncoderLayer,
    quantized_child,
)
from sparsebit.quantization.modules.linear import QLinear
from sparsebit.quantization.modules.normalization import QLayerNorm

N, L, S, E, H = 3, 5, 7, 8, 2
NEG = float("-inf")
CFG = {"BACKEND": "virtual", "W": {"QSCHEME": "per-channel-symmetric"}, "A": {"OBSERVER": {"TYPE": "minmax"}}}


pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The kernels here are tiny: two threads would mostly wait for each other, seconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shake(module):
    """Biases that matter: torch starts them at zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * 0.4)
    return module.eval()


def attention(**options):
    return shake(nn.MultiheadAttention(E, H, **options))


def causal(length):
    return torch.ones(length, length).triu(1).bool()


def inputs(batch_first=False, batched=True, kdim=E, vdim=E, self_attention=False, dtype=torch.float32):
    torch.manual_seed(1)
    shapes = [(N, L, E), (N, S, kdim), (N, S, vdim)]
    q, k, v = (torch.randn(s, dtype=dtype) for s in shapes)
    if not batched:
        q, k, v = q[0], k[0], v[0]
    elif not batch_first:
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    return (q, q, q) if self_attention else (q, k, v)


PAD = torch.tensor([[0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1, 1], [0] * 7]).bool()
MASK = torch.rand(L, S, generator=torch.Generator().manual_seed(0)) > 0.6
MASK[:, 0] = False
MASK3 = (torch.rand(N * H, L, S, generator=torch.Generator().manual_seed(1)) > 0.6) & (torch.arange(S) > 0)
FLOAT = torch.randn(L, S, generator=torch.Generator().manual_seed(2))

OPTIONS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "kdim_vdim": {"kdim": 5, "vdim": 6},
    "kdim_only_no_bias": {"kdim": 5, "bias": False, "batch_first": True},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "all": {"kdim": 5, "vdim": 6, "add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "dropout": {"dropout": 0.5},
}
CALLS = {
    "none": {},
    "padding": {"key_padding_mask": PAD},
    "float_padding": {"key_padding_mask": torch.zeros(N, S).masked_fill(PAD, NEG)},
    "mask": {"attn_mask": MASK},
    "float_mask": {"attn_mask": FLOAT},
    "mask3": {"attn_mask": MASK3},
    "both": {"attn_mask": MASK, "key_padding_mask": PAD & (torch.arange(S) > 0)},
    "float_mask3": {"attn_mask": torch.zeros(MASK3.shape).masked_fill(MASK3, NEG)},
    "hint": {"attn_mask": torch.ones(L, S).triu(1).bool(), "is_causal": True},
    "hint_and_padding": {
        "attn_mask": torch.ones(L, S).triu(1).bool(),
        "is_causal": True,
        "key_padding_mask": PAD,
    },
}
WEIGHTS = {
    "average": {},
    "per_head": {"average_attn_weights": False},
    "no_weights": {"need_weights": False},
}


def assert_same(got, want, tol=1e-5):
    assert (got[1] is None) == (want[1] is None)
    for g, w in zip(got, want):
        if w is not None:
            torch.testing.assert_close(g, w, rtol=tol, atol=tol)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", OPTIONS)
def test_float_output_of_every_option(options, call, weights):
    options, call = OPTIONS[options], CALLS[call] | WEIGHTS[weights]
    mha = attention(**options)
    args = inputs(
        batch_first=options.get("batch_first", False),
        kdim=options.get("kdim", E),
        vdim=options.get("vdim", E),
    )
    want = mha(*args, **call)  # with grad: torch's slow path, the reference for masked rows
    assert_same(QMultiheadAttention(mha)(*args, **call), want)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_unbatched_inputs(options, weights):
    options = OPTIONS[options]
    mha = attention(**options)
    args = inputs(batched=False, kdim=options.get("kdim", E), vdim=options.get("vdim", E))
    call = {"key_padding_mask": PAD[1], "attn_mask": MASK3[:H] & (torch.arange(S) > 1)} | WEIGHTS[weights]
    assert_same(QMultiheadAttention(mha)(*args, **call), mha(*args, **call))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_self_attention_with_and_without_torchs_fast_path(batch_first, grad):
    mha, call = attention(batch_first=batch_first), {"attn_mask": causal(L), "need_weights": False}
    args = inputs(batch_first=batch_first, self_attention=True)
    with torch.set_grad_enabled(grad):
        assert_same(QMultiheadAttention(mha)(*args, **call), mha(*args, **call))


def test_the_output_can_be_viewed_wherever_torchs_can():
    for batch_first in (True, False):
        mha = attention(batch_first=batch_first)
        QMultiheadAttention(mha)(*inputs(batch_first))[0].view(N * L, E)


def test_keyword_arguments():
    mha, (q, k, v) = attention(), inputs()
    assert_same(
        QMultiheadAttention(mha)(value=v, key=k, query=q, attn_mask=MASK),
        mha(query=q, key=k, value=v, attn_mask=MASK),
    )


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_in_training(need_weights):
    """The same random numbers give the same output; the returned weights are the dropped ones."""
    mha, args = attention(dropout=0.5).train(), inputs()
    qmha = QMultiheadAttention(mha)
    assert qmha.training and all(m.training for m in qmha.modules())
    torch.manual_seed(3)
    want = mha(*args, need_weights=need_weights)
    torch.manual_seed(3)
    got = qmha(*args, need_weights=need_weights)
    assert_same(got, want)
    assert not torch.equal(got[0], qmha(*args)[0])


def test_a_row_with_everything_masked_is_zero_or_nan_as_in_torch():
    mha, args = attention(), inputs()
    qmha, pad = QMultiheadAttention(mha), PAD.clone()
    pad[0] = True
    for need_weights in (True, False):
        want = mha(*args, key_padding_mask=pad, need_weights=need_weights)[0]
        got = qmha(*args, key_padding_mask=pad, need_weights=need_weights)[0]
        torch.testing.assert_close(got, want, equal_nan=True)
        assert want[:, 0].isnan().all() == need_weights


def test_wrong_masks_are_refused():
    qmha, args = QMultiheadAttention(attention()), inputs()
    with pytest.raises(SparsebitError, match=r"key_padding_mask is torch\.uint8"):
        qmha(*args, key_padding_mask=PAD.to(torch.uint8))
    with pytest.raises(SparsebitError, match="pass attn_mask too"):
        qmha(*args, is_causal=True)
    for mask in (MASK[:, :-1], MASK.repeat(1, 2), MASK3[:-1], MASK3[0, :-1]):
        with pytest.raises(RuntimeError):
            qmha(*args, attn_mask=mask)
    for pad in (PAD[:, :-1], PAD[:-1], PAD.T):
        with pytest.raises(RuntimeError):
            qmha(*args, key_padding_mask=pad)


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.bfloat16, 0.05)])
def test_other_dtypes(dtype, tol):
    mha = attention(add_bias_kv=True, add_zero_attn=True).to(dtype)
    args = inputs(dtype=dtype)
    got = QMultiheadAttention(mha)(*args, attn_mask=MASK)
    assert got[0].dtype == dtype
    assert_same(got, mha(*args, attn_mask=MASK), tol)


def test_autocast():
    mha, args = attention(batch_first=True), inputs(batch_first=True)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = mha(*args, key_padding_mask=PAD), QMultiheadAttention(mha)(*args, key_padding_mask=PAD)
    assert got[0].dtype == want[0].dtype
    assert_same(got, want, 0.05)


@pytest.mark.parametrize("options", ["plain", "all", "no_bias"])
def test_gradients(options):
    options = OPTIONS[options]
    mha = attention(**options).train()
    args = inputs(options.get("batch_first", False), kdim=options.get("kdim", E), vdim=options.get("vdim", E))
    qmha = QMultiheadAttention(copy.deepcopy(mha))
    for module in (mha, qmha):
        module(*args, attn_mask=MASK, need_weights=False)[0].square().sum().backward()
    packed = (mha.in_proj_weight,) if mha.in_proj_weight is not None else _separate(mha)
    want = torch.cat([w.grad.flatten() for w in packed])
    got = torch.cat([getattr(qmha, f"{n}_proj").weight.grad.flatten() for n in "qkv"])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(qmha.out_proj.weight.grad, mha.out_proj.weight.grad, rtol=1e-4, atol=1e-5)
    if mha.in_proj_bias is not None:
        got = torch.cat([getattr(qmha, f"{n}_proj").bias.grad for n in "qkv"])
        torch.testing.assert_close(got, mha.in_proj_bias.grad, rtol=1e-4, atol=1e-5)
    if mha.bias_k is not None:
        torch.testing.assert_close(qmha.bias_k.grad, mha.bias_k.grad, rtol=1e-4, atol=1e-5)
    assert all(p.grad is not None for p in qmha.parameters())


def _separate(mha):
    return mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight


def test_frozen_weights_stay_frozen():
    assert not any(
        p.requires_grad for p in QMultiheadAttention(attention().requires_grad_(False)).parameters()
    )


def test_every_weight_is_there_once():
    mha = attention(add_bias_kv=True)
    qmha = QMultiheadAttention(mha)
    assert sum(p.numel() for p in qmha.parameters()) == sum(p.numel() for p in mha.parameters())
    assert len({t.data_ptr() for t in qmha.state_dict().values()}) == len(qmha.state_dict())
    assert mha.in_proj_weight is not None  # the user's module is as it was


class Pool(nn.Module):
    """Attention by torch's function, with weights of its own layers."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (shake(nn.Linear(E, E)) for _ in range(4))

    def forward(self, x):
        biases = torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias])
        return nn.functional.multi_head_attention_forward(
            *(x[:1], x, x, E, H, None, biases, None, None, False, 0.0, self.c_proj.weight, self.c_proj.bias),
            use_separate_proj_weight=True,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            training=False,
            need_weights=False,
        )[0]


def test_the_function():
    net, x = Pool().eval(), inputs()[0]
    qmodel = QuantModel(net, CFG)
    torch.testing.assert_close(qmodel(x), net(x), rtol=1e-5, atol=1e-5)
    qmodel.calibrate([x])
    qmodel.set_quant(True, True)
    with torch.no_grad():
        assert 20 < sqnr(net(x), qmodel(x)) < 60
    assert len([n for n, _ in qmodel.named_quantizers() if "identity" in n]) == 6


# -- layers ------------------------------------------------------------------------------------------
LAYERS = {
    "post_norm": {},
    "norm_first": {"norm_first": True},
    "gelu": {"activation": "gelu", "batch_first": True},
    "callable": {"activation": torch.tanh, "norm_first": True, "batch_first": True},
    "module": {"activation": nn.SiLU(), "layer_norm_eps": 0.1},
    "no_bias": {"bias": False, "batch_first": True},
}


def layer_inputs(batch_first, length=L, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(N, length, E)
    return x if batch_first else x.transpose(0, 1).contiguous()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "causal"])
@pytest.mark.parametrize("options", LAYERS)
def test_encoder_layer(options, masks, grad):
    options = LAYERS[options]
    layer = shake(nn.TransformerEncoderLayer(E, H, 16, **options))
    qlayer, x = QTransformerEncoderLayer(layer), layer_inputs(options.get("batch_first", False))
    call = {
        "none": {},
        "padding": {"src_key_padding_mask": PAD[:, -L:] & (torch.arange(L) > 0)},
        "causal": {"src_mask": causal(L), "is_causal": True},
    }[masks]
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(qlayer(x, **call), layer(x, **call), rtol=1e-5, atol=1e-5)
    kinds = {name: type(m) for name, m in qlayer.named_children()}
    assert kinds["self_attn"] is QMultiheadAttention and kinds["norm1"] is kinds["norm2"] is QLayerNorm
    assert kinds["linear1"] is kinds["linear2"] is QLinear and kinds["dropout1"] is nn.Dropout


@pytest.mark.parametrize("options", LAYERS)
def test_decoder_layer(options):
    options = LAYERS[options]
    layer = shake(nn.TransformerDecoderLayer(E, H, 16, **options))
    first = options.get("batch_first", False)
    tgt, memory = layer_inputs(first), layer_inputs(first, S, 2)
    call = {
        "tgt_mask": causal(L),
        "tgt_is_causal": True,
        "memory_mask": MASK,
        "memory_key_padding_mask": PAD & (torch.arange(S) > 0),
    }
    got = QTransformerDecoderLayer(layer)(tgt, memory, **call)
    torch.testing.assert_close(got, layer(tgt, memory, **call), rtol=1e-5, atol=1e-5)


def test_encoder_layer_in_training_drops_what_torch_drops():
    layer, x = shake(nn.TransformerEncoderLayer(E, H, 16, dropout=0.3)).train(), layer_inputs(False)
    torch.manual_seed(0)
    want = layer(x)
    torch.manual_seed(0)
    torch.testing.assert_close(QTransformerEncoderLayer(layer)(x), want, rtol=1e-5, atol=1e-5)


def test_a_subclass_that_overrides_a_block_keeps_it():
    class Loud(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            return self.louder(super()._ff_block(x))

        def louder(self, x):
            return 3 * x

    layer, x = shake(Loud(E, H, 16)), layer_inputs(False)
    qlayer = QTransformerEncoderLayer(layer)
    torch.testing.assert_close(qlayer(x), layer(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(qlayer)(x), layer(x), rtol=1e-5, atol=1e-5)


def encoder(**options):
    return shake(nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, **options), 2, nn.LayerNorm(E)))


def test_encoder_with_padding_uses_no_nested_tensor():
    net, x = encoder(batch_first=True), layer_inputs(True)
    pad = torch.arange(L) >= torch.tensor([[2], [5], [4]])
    with torch.no_grad():
        want, got = net(x, src_key_padding_mask=pad), QTransformerEncoder(net)(x, src_key_padding_mask=pad)
    assert net.use_nested_tensor
    torch.testing.assert_close(got[~pad], want[~pad], rtol=1e-5, atol=1e-5)  # the rest: torch fills in zeros


def test_transformer_in_a_model():
    net = shake(nn.Transformer(E, H, 2, 2, 16, norm_first=True, batch_first=True))
    batch = {"src": layer_inputs(True, S), "tgt": layer_inputs(True), "tgt_mask": causal(L)}

    class Wrap(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, src, tgt, tgt_mask):
            return self.net(src, tgt, tgt_mask=tgt_mask)

    model = Wrap().eval()
    qmodel = QuantModel(model, CFG)
    torch.testing.assert_close(qmodel(**batch), model(**batch), rtol=1e-5, atol=1e-5)
    qmodel.calibrate([batch])
    qmodel.set_quant(True, True)
    with torch.no_grad():
        assert 20 < sqnr(model(**batch), qmodel(**batch)) < 60
    linears = [m for m in qmodel.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 2 * (4 + 2) + 2 * (8 + 2) and all(isinstance(m, QLinear) for m in linears)


def test_a_layer_that_is_used_twice_stays_one():
    layer = nn.TransformerEncoderLayer(E, H, 16)
    net = quantized_child(nn.Sequential(nn.ModuleList([layer, layer]), nn.GELU()))
    assert isinstance(net[0][0], QTransformerEncoderLayer) and net[0][0] is net[0][1]
    assert type(net[1]) is nn.GELU


# -- quantized ---------------------------------------------------------------------------------------
class SelfAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attn = attention(batch_first=True, **options)

    def forward(self, x, pad=None):
        return x + self.attn(x, x, x, key_padding_mask=pad, need_weights=False)[0]


def calibrated(net, batch, config=CFG):
    return sparsebit.quantize(net, [batch], config)


def on_grid(values, quantizer):
    """Are all `values` integer multiples of the scale, and within the codes?"""
    spec = quantizer.spec
    shape = [-1] + [1] * (values.dim() - 1) if quantizer.is_perchannel else [1]
    codes = values.double() / quantizer.scale.double().reshape(shape) + quantizer.zero_point.double().reshape(
        shape
    )
    close = (codes - codes.round()).abs().max() < 1e-3
    return bool(close and codes.round().min() >= spec.qmin and codes.round().max() <= spec.qmax)


def test_quantized_attention_in_a_model():
    net, x = SelfAttention(add_bias_kv=True).eval(), layer_inputs(True)
    qmodel = calibrated(net, x)
    attn = next(m for m in qmodel.modules() if isinstance(m, QMultiheadAttention))
    with torch.no_grad():
        assert 25 < sqnr(net(x), qmodel(x)) < 60
        qmodel.set_quant(False, False)
        torch.testing.assert_close(qmodel(x), net(x), rtol=1e-5, atol=1e-5)
        qmodel.set_quant(True, True)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            layer = getattr(attn, name)
            assert layer.weight_quantizer.scale.shape == (E,)
            assert on_grid(layer.quantized_weight(), layer.weight_quantizer)
            assert not on_grid(layer.weight, layer.weight_quantizer)


def test_both_matmuls_see_values_on_the_grid(monkeypatch):
    net, x = SelfAttention().eval(), layer_inputs(True)
    qmodel = calibrated(net, x)
    attn = next(m for m in qmodel.modules() if isinstance(m, QMultiheadAttention))
    seen, real = [], torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: seen.append((a, b)) or real(a, b))
    with torch.no_grad():
        qmodel(x)
    (q, k), (probs, v) = seen
    for value, name in ((q, "query"), (k, "key"), (probs, "probs"), (v, "value")):
        quantizer = getattr(attn, name).input_quantizer
        assert quantizer.use_quant and on_grid(value, quantizer), name


def test_names_of_the_quantizers():
    qmodel = calibrated(SelfAttention().eval(), layer_inputs(True))
    names = {name for name, _ in qmodel.named_quantizers()}
    inside = {"q_proj", "k_proj", "v_proj", "out_proj", "query", "key", "probs", "value"}
    assert {f"attn_{name}.input_quantizer" for name in inside} <= names
    assert {f"attn_{name}.weight_quantizer" for name in inside if "proj" in name} <= names


def test_residual_additions_stay_float():
    """A norm reads every sum of these layers."""
    net, x = nn.Sequential(encoder(batch_first=True).layers[0]).eval(), layer_inputs(True)
    qmodel = calibrated(
        net, x, CFG | {"BACKEND": "virtual", "A": CFG["A"] | {"QADD": {"ENABLE_QUANT": True}}}
    )
    assert not [name for name, _ in qmodel.named_quantizers() if "add" in name]
    with torch.no_grad():
        assert 20 < sqnr(net(x), qmodel(x)) < 60


def test_state_dict_and_deepcopy(tmp_path):
    net, x = nn.Sequential(encoder(batch_first=True)).eval(), layer_inputs(True)
    qmodel = calibrated(net, x)
    with torch.no_grad():
        want = qmodel(x)
        assert torch.equal(copy.deepcopy(qmodel)(x), want)
        qmodel.save(tmp_path)
        assert torch.equal(QuantModel.load(tmp_path, net)(x), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_quantized_in_other_dtypes(dtype):
    net, x = SelfAttention().eval(), layer_inputs(True)
    qmodel = calibrated(net, x)
    with torch.no_grad():
        got = qmodel.to(dtype)(x.to(dtype))
        assert got.dtype == dtype and sqnr(net.float()(x), got.float()) > 20


def test_training_with_quantization_reaches_every_parameter():
    net, x = nn.Sequential(encoder(batch_first=True)), layer_inputs(True)
    qmodel = calibrated(net, x).train()
    qmodel(x).square().sum().backward()
    missing = [n for n, p in qmodel.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not missing


def test_quantizers_exist_everywhere():
    qmodel = calibrated(nn.Sequential(encoder()).eval(), layer_inputs(False))
    oprs = [m for m in qmodel.modules() if isinstance(m, QuantOpr)]
    assert oprs and all(m.input_quantizer is not None for m in oprs if not isinstance(m, nn.LayerNorm))
