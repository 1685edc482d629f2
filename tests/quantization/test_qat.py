"""Quantization-aware training: everything a training loop does with a QuantModel, on the CPU, on tiny nets."""

from __future__ import annotations

import copy
import logging
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import sparsebit
from models import small_net, sqnr
from sparsebit import QuantConfig, QuantModel
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.qat import Stages, distillation_loss
from sparsebit.quantization.quantizers import Quantizer, build_quantizer

PER = ("per-tensor-symmetric", "per-tensor-affine", "per-channel-symmetric", "per-channel-affine")
TYPES = [("lsq", "lsq"), ("lsq+", "lsq+"), ("uniform", "pact"), ("dorefa", "dorefa")]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def tiny(negative=()):
    torch.manual_seed(0)
    net = Tiny().eval()
    for bn in (net.bn1, net.bn2):
        bn.running_mean.normal_(0, 0.3)
        bn.running_var.uniform_(0.5, 1.5)
        nn.init.uniform_(bn.weight, 0.5, 1.5)
        nn.init.normal_(bn.bias, 0, 0.2)
        with torch.no_grad():
            bn.weight[list(negative)] *= -1
    return net


def batches(n=4, size=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 3, 8, 8, generator=g) for _ in range(n)]


X, Y = batches(), torch.randint(5, (8,), generator=torch.Generator().manual_seed(2))


def config(
    w="lsq", a="lsq", bits=4, w_scheme=PER[2], a_scheme=PER[1], fuse=False, backend="onnxruntime", **more
):
    return QuantConfig.load(
        {
            "BACKEND": backend,
            "SCHEDULE": {"FUSE_BN": fuse},
            "W": {"QSCHEME": w_scheme, "QUANTIZER": {"TYPE": w, "BIT": bits}, **more},
            "A": {"QSCHEME": a_scheme, "QUANTIZER": {"TYPE": a, "BIT": bits}},
        }
    )


def prepared(net=None, cfg=None, data=X, **options):
    """A model at the start of training."""
    qmodel = QuantModel(net or tiny(), cfg or config(**options))
    qmodel.prepare_calibration(asym=False)
    with torch.no_grad():
        for x in data:
            qmodel(x)
    qmodel.init_QAT()
    return qmodel.train()


def sgd(qmodel, lr=0.02):
    return torch.optim.SGD(qmodel.qat_parameter_groups(lr, weight_decay=1e-3), lr, momentum=0.9)


def train(model, optimizer, steps=3, data=X, stages=None):
    losses = []
    for i in range(steps):
        loss = F.cross_entropy(model(data[i % len(data)]).float(), Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if stages is not None:
            stages.step()
    return losses


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


# -- the loop ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("w, a", TYPES)
def test_an_ordinary_loop_learns(w, a):
    qmodel = prepared(w=w, a=a)
    before = {name: p.clone() for name, p in qmodel.named_parameters()}
    losses = train(qmodel, sgd(qmodel), 30, X[:1])
    assert losses[-1] < 0.8 * losses[0]
    learning = {name: p for name, p in qmodel.named_parameters() if p.requires_grad}
    still = {name for name, p in learning.items() if torch.equal(p, before[name])}
    assert all(p.grad is not None for p in learning.values())
    assert not [name for name in still if name.endswith(("weight", "quantizer.scale", "fc.bias"))]


@pytest.mark.parametrize("scheme", PER)
@pytest.mark.parametrize("w", ["lsq", "lsq+", "uniform", "dorefa"])
def test_every_scheme_trains(w, scheme):
    a = "lsq" if w == "dorefa" else w
    qmodel = prepared(w=w, a=a, w_scheme=scheme, a_scheme=scheme, backend="virtual")
    losses = train(qmodel, sgd(qmodel, 0.01), 6, X[:1])
    assert losses[-1] < losses[0]
    for _, q in qmodel.named_quantizers():
        assert q.is_symmetric == scheme.endswith("-symmetric")
        assert q.is_perchannel == scheme.startswith("per-channel")


def test_init_QAT_takes_a_calibrated_model_as_it_is_and_refuses_another():
    qmodel = QuantModel(tiny(), config())
    with pytest.raises(CalibrationError, match=r"init_QAT\(\) needs scales .* conv1\.\w+_quantizer has none"):
        qmodel.init_QAT()
    qmodel.calibrate(X)
    before = copy.deepcopy(qmodel)
    qmodel.init_QAT()
    assert same_state(qmodel, before) and all(q.use_quant for _, q in qmodel.named_quantizers())


def test_scales_of_quantizers_that_are_off_do_not_wait_for_gradients():
    """DDP would hang on them; a quantizer is off because its op is fused or because the config says so."""
    cfg = config().override("A.SPECIFIC", [{"conv2": ["QUANTIZER.DISABLE", True]}])
    qmodel = prepared(cfg=cfg)
    train(qmodel, sgd(qmodel), 1)
    assert all(p.grad is not None for p in qmodel.parameters() if p.requires_grad)


# -- parameter groups ----------------------------------------------------------------------------------------
def test_parameter_groups():
    qmodel = prepared(w="lsq", a="lsq+")
    qmodel.model.fc.weight.requires_grad_(False)
    groups = {g["name"]: g for g in qmodel.qat_parameter_groups(0.1, scale_lr=0.01, weight_decay=0.5)}
    names = {id(p): name for name, p in qmodel.named_parameters()}
    got = {key: sorted(names[id(p)] for p in g["params"]) for key, g in groups.items()}
    assert got["weights"] == ["model.conv1.weight", "model.conv2.weight"]
    others = ["bn1.bias", "bn1.weight", "bn2.bias", "bn2.weight", "conv2.bias", "fc.bias"]
    assert got["biases"] == [f"model.{name}" for name in others]
    layers = ("conv1", "conv2", "fc")
    kinds = ("input_quantizer.scale", "input_quantizer.zero_point", "weight_quantizer.scale")
    own = [f"model.{layer}.{kind}" for layer in layers for kind in kinds]
    assert set(own) <= set(got["scales"]) and all("_quantizer." in name for name in got["scales"])
    assert [groups[k]["weight_decay"] for k in ("weights", "biases", "scales")] == [0.5, 0, 0]
    assert [groups[k]["lr"] for k in ("weights", "biases", "scales")] == [0.1, 0.1, 0.01]
    everything = [name for found in got.values() for name in found]
    assert sorted(everything) == sorted(n for n, p in qmodel.named_parameters() if p.requires_grad)
    assert qmodel.qat_parameter_groups(0.1)[2]["lr"] == 0.1


def test_tied_weights_are_in_one_group_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x):
            return self.out(self.words(x).mean(1))

    qmodel = QuantModel(Tied(), config(backend="virtual")).calibrate([torch.randint(7, (4, 3))])
    qmodel.init_QAT()
    found = [p for g in qmodel.qat_parameter_groups(0.1) for p in g["params"]]
    assert len({id(p) for p in found}) == len(found)
    assert sum(p is qmodel.model.out.weight for p in found) == 1
    torch.optim.Adam(qmodel.qat_parameter_groups(0.1))


# -- batch norms ---------------------------------------------------------------------------------------------
def test_frozen_norms_stay_frozen():
    qmodel = prepared()
    moving = qmodel.model.bn1.running_mean.clone()
    qmodel(X[0])
    assert not torch.equal(qmodel.model.bn1.running_mean, moving)
    qmodel.freeze_batchnorm()
    fixed = qmodel.model.bn1.running_mean.clone()
    qmodel.eval().train()
    qmodel(X[0]).sum().backward()
    assert torch.equal(qmodel.model.bn1.running_mean, fixed) and qmodel.training
    assert qmodel.model.bn1.weight.grad is not None and not qmodel.model.bn1.training
    qmodel.freeze_batchnorm(affine=True)
    assert not qmodel.model.bn1.weight.requires_grad and not qmodel.model.bn1.bias.requires_grad


@pytest.mark.parametrize("scheme", PER)
@pytest.mark.parametrize("w", ["lsq", "lsq+", "dorefa", "uniform"])
def test_folding_keeps_the_codes_that_were_trained(w, scheme):
    qmodel = prepared(tiny(negative=[1, 4]), w=w, a="lsq+", w_scheme=scheme, backend="virtual")
    train(qmodel, sgd(qmodel), 3)
    qmodel.eval()
    x = batches(seed=9)[0]
    with torch.no_grad():
        want = qmodel(x)
        convs = [(qmodel.model.conv1, qmodel.model.bn1), (qmodel.model.conv2, qmodel.model.bn2)]
        factors = [bn.weight / (bn.running_var + bn.eps).sqrt() for _, bn in convs]
        rounded = [c.quantized_weight() * f.view(-1, 1, 1, 1) for (c, _), f in zip(convs, factors)]
        qmodel.fold_batchnorm()
        assert not any(isinstance(m, nn.BatchNorm2d) for m in qmodel.modules())
        for (conv, _), expected in zip(convs, rounded):
            torch.testing.assert_close(conv.quantized_weight(), expected, rtol=1e-5, atol=1e-7)
        got = qmodel(x)
    assert sqnr(want, got) > 30  # codes of activations may flip on boundaries, each by one step of 15
    assert (want - got).abs().median() < 1e-5


def test_calibration_makes_norms_positive_and_the_network_stays_the_same():
    net = tiny(negative=[0, 3])
    qmodel = prepared(net)
    assert (qmodel.model.bn1.weight > 0).all() and (qmodel.model.bn2.weight > 0).all()
    qmodel.set_quant(False, False)
    assert torch.equal(qmodel.eval()(X[0]), net(X[0])) and (net.bn1.weight < 0).any()


@pytest.mark.parametrize("scheme, lost", [(PER[2], True), (PER[3], False)])
def test_a_norm_that_turned_negative_loses_the_lowest_code_at_most(scheme, lost, caplog):
    qmodel = prepared(w="uniform", bits=2, w_scheme=scheme, backend="virtual")
    conv, bn = qmodel.model.conv1, qmodel.model.bn1
    with torch.no_grad():
        bn.weight[2] *= -1
        conv.weight[2, 0, 0, 0] = -10.0  # the lowest code
        before = conv.quantized_weight()[2] * (bn.weight / (bn.running_var + bn.eps).sqrt())[2]
        with caplog.at_level(logging.WARNING, logger="sparsebit"):
            qmodel.fold_batchnorm()
        after = conv.quantized_weight()[2]
    same = (after - before).abs() < 1e-6
    assert bool(same.all()) != lost and ("codes could not be kept" in caplog.text) == lost
    highest = before.max()
    assert bool(same[before < 0.9 * highest].all())  # all but the mirror of the lowest


def test_a_folded_model_saves_loads_and_exports_integer_convolutions(tmp_path):
    pytest.importorskip("onnxruntime")
    net = tiny()
    qmodel = prepared(net, bits=8, w="dorefa", a="lsq", w_scheme=PER[0])  # per tensor becomes per channel
    train(qmodel, sgd(qmodel), 2)
    qmodel.eval().fold_batchnorm()
    report = qmodel.export_onnx(X[0], str(tmp_path / "m.onnx"), batches=X[1:])
    assert report.ok and report.integer["QLinearConv"] == 2, report
    qmodel.save(tmp_path / "saved")
    again = QuantModel.load(tmp_path / "saved", net)
    assert torch.equal(again(X[0]), qmodel(X[0]))


# -- stages, distillation, EMA -------------------------------------------------------------------------------
def modes(qmodel):
    conv = qmodel.model.conv1
    return conv.weight_quantizer.use_quant, conv.input_quantizer.use_quant, not qmodel.model.bn1.training


def test_stages():
    qmodel = prepared()
    stages = Stages(qmodel, weights=0, activations=2, freeze_bn=3)
    seen = [modes(qmodel)]
    optimizer = sgd(qmodel)
    for _ in range(4):
        train(qmodel, optimizer, 1, stages=stages)
        seen.append(modes(qmodel))
    off, on = (True, False, False), (True, True, False)
    assert seen == [off, off, on, (True, True, True), (True, True, True)]
    assert sparsebit.qat.Stages is Stages


def test_distillation_loss():
    student, teacher = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    labels = torch.randint(5, (6,))
    soft = F.kl_div((student / 3).log_softmax(1), (teacher / 3).softmax(1), reduction="batchmean") * 9
    hard = F.cross_entropy(student, labels)
    torch.testing.assert_close(distillation_loss(student, teacher, temperature=3), soft)
    loss = distillation_loss(student, teacher, labels, temperature=3, alpha=0.7)
    torch.testing.assert_close(loss, 0.7 * soft + 0.3 * hard)
    loss.backward()
    assert teacher.grad is None and distillation_loss(teacher, teacher) < 1e-6


def test_averaged_weights(tmp_path):
    pytest.importorskip("onnxruntime")
    net = tiny()
    qmodel = prepared(net)
    averaged = AveragedModel(qmodel, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = sgd(qmodel, 0.05)
    mean = {name: p.detach().clone() for name, p in qmodel.named_parameters()}
    for step in range(4):
        train(qmodel, optimizer, 1)
        averaged.update_parameters(qmodel)
        for name, p in qmodel.named_parameters():
            mean[name] = p.detach().clone() if step == 0 else 0.9 * mean[name] + 0.1 * p.detach()
    ema = averaged.module.eval()
    for name, p in ema.named_parameters():
        torch.testing.assert_close(p, mean[name], rtol=1e-5, atol=1e-6)
    assert all((q.scale > 0).all() for _, q in ema.named_quantizers())
    ema.save(tmp_path / "ema")
    assert torch.equal(QuantModel.load(tmp_path / "ema", net)(X[0]), ema(X[0]))
    assert not torch.equal(ema(X[0]), qmodel.eval()(X[0]))
    ema.fold_batchnorm()
    assert ema.export_onnx(X[0], str(tmp_path / "m.onnx")).ok


# -- what else runs a model ----------------------------------------------------------------------------------
def gradients(qmodel):
    return {name: p.grad.clone() for name, p in qmodel.named_parameters() if p.grad is not None}


def every_type():
    """lsq, lsq+, pact, dorefa and uniform in one model: compiling is slow."""
    types = {"conv2": ("lsq+", "lsq+"), "fc": ("dorefa", "pact")}
    specific = lambda i: [{layer: ["QUANTIZER.TYPE", both[i]]} for layer, both in types.items()]
    return prepared(cfg=config(SPECIFIC=specific(0)).override("A.SPECIFIC", specific(1)))


def compiled_like_eager(backend):
    torch._dynamo.reset()
    qmodel = every_type()
    twin = copy.deepcopy(qmodel)
    compiled = torch.compile(twin, backend=backend, fullgraph=True)
    for model in (qmodel, compiled):
        F.cross_entropy(model(X[0]), Y).backward()
    eager, other = gradients(qmodel), gradients(twin)
    assert set(eager) == set(other) and len(eager) > 15
    for name, grad in eager.items():
        torch.testing.assert_close(other[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")
    return qmodel, compiled


def test_compiled_training_is_eager_training():
    qmodel, compiled = compiled_like_eager("aot_eager")
    torch.testing.assert_close(compiled.eval()(X[1]), qmodel.eval()(X[1]))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a compiler")
def test_training_compiled_to_machine_code_is_eager_training():
    compiled_like_eager("inductor")


def test_bf16_autocast():
    qmodel = prepared()
    with torch.autocast("cpu", torch.bfloat16):
        out = qmodel(X[0])
    assert out.dtype == torch.bfloat16
    F.cross_entropy(out.float(), Y).backward()
    half = gradients(qmodel)
    qmodel.zero_grad()
    qmodel.set_quant(True, True)
    F.cross_entropy(qmodel(X[0]), Y).backward()
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in half.values())
    weight = "model.fc.weight"
    assert F.cosine_similarity(half[weight].flatten(), gradients(qmodel)[weight].flatten(), dim=0) > 0.95


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    qmodel = prepared(fuse=True)  # a running mean would be updated twice, as in any model
    F.cross_entropy(qmodel(X[0]), Y).backward()
    plain = gradients(qmodel)
    qmodel.zero_grad()
    x = X[0].clone().requires_grad_()
    F.cross_entropy(checkpoint(qmodel, x, use_reentrant=reentrant), Y).backward()
    again = gradients(qmodel)
    assert set(plain) == set(again) and all(torch.equal(plain[k], again[k]) for k in plain)


@pytest.mark.parametrize("w, a", TYPES)
def test_a_resumed_run_is_the_same_to_the_last_bit(w, a, tmp_path):
    def start(qmodel):
        optimizer = torch.optim.Adam(qmodel.qat_parameter_groups(0.01, 0.005, 1e-3))
        return optimizer, Stages(qmodel, activations=1, freeze_bn=5)

    qmodel = prepared(w=w, a=a)
    optimizer, stages = start(qmodel)
    train(qmodel, optimizer, 4, stages=stages)
    saved = {"model": qmodel.state_dict(), "optimizer": optimizer.state_dict(), "stages": stages.state_dict()}
    torch.save(saved, tmp_path / "run.pt")
    train(qmodel, optimizer, 4, stages=stages)

    other = QuantModel(tiny(), config(w=w, a=a))
    state = torch.load(tmp_path / "run.pt")
    other.load_state_dict(state["model"])
    other.init_QAT()
    other.train()
    optimizer, stages = start(other)
    optimizer.load_state_dict(state["optimizer"])
    stages.load_state_dict(state["stages"])
    train(other, optimizer, 4, stages=stages)
    assert same_state(qmodel, other) and modes(qmodel) == modes(other) == (True, True, True)


# -- the file ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("w, a", TYPES)
def test_a_trained_model_exports_with_the_certificate(w, a, tmp_path):
    """2, 4 and 8 bits in one file, each quantizer with its trained grid."""
    pytest.importorskip("onnxruntime")
    cfg = config(w=w, a=a, SPECIFIC=[{"conv2": ["QUANTIZER.BIT", 2]}, {"fc": ["QUANTIZER.BIT", 8]}])
    cfg = cfg.override("A.SPECIFIC", [{"conv2": ["QUANTIZER.BIT", 2]}])
    qmodel = prepared(cfg=cfg)
    train(qmodel, sgd(qmodel), 4)
    qmodel.eval().fold_batchnorm()
    report = qmodel.export_onnx(X[0], str(tmp_path / "m.onnx"), batches=X[1:])
    checks = report.certificate.quantizers
    assert report.ok and set(checks) == {name for name, _ in qmodel.named_quantizers()}
    assert sum(c.wrong for c in checks.values()) == 0
    assert {q.bit for _, q in qmodel.named_quantizers()} >= {2, 4, 8}


# -- quantizers ----------------------------------------------------------------------------------------------
def activation(kind, scheme, bits=4, observer=None):
    cfg = config(a=kind, bits=bits, a_scheme=scheme)
    return build_quantizer((cfg.override("A.OBSERVER.TYPE", observer) if observer else cfg).a)


def test_lsq_has_a_zero_point_where_data_is_lopsided():
    """A smooth activation with a short negative side: a symmetric grid has codes that are never used."""
    x = F.gelu(torch.randn(4, 5, 50, 50))
    got = {}
    for scheme in PER[:2]:
        q = activation("lsq", scheme)
        q.update_observer(x)
        q.calc_qparams()
        q.enable_quant()
        got[scheme] = sqnr(x, q(x).detach())
    assert got[PER[1]] > got[PER[0]] + 2 and q.zero_point.item() == 1


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lsq_starts_where_the_paper_does(bits):
    """Where minmax is named; else at the range of mse."""
    x = torch.randn(64, 50)
    signed, unsigned = (activation("lsq", scheme, bits, "minmax") for scheme in PER[:2])
    for q, data, qmax in ((signed, x, 2 ** (bits - 1) - 1), (unsigned, x.relu(), 2**bits - 1)):
        q.update_observer(data[:20])
        q.update_observer(data[20:])
        q.calc_qparams()
        expected = 2 * data.double().abs().mean() / qmax**0.5
        torch.testing.assert_close(q.scale.item(), expected.item(), rtol=1e-6, atol=0)


def test_pact_starts_at_what_calibration_saw():
    for scheme, data, bound in (
        (PER[1], torch.tensor([0.0, 2, 3]), 3),
        (PER[1], torch.tensor([-4.0, 3]), 4),
        (PER[0], torch.tensor([0.0, 50]), 10),
    ):
        q = activation("pact", scheme)
        q.update_observer(data)
        q.calc_qparams()
        assert q.alpha.item() == bound


def test_everything_is_as_public_as_it_was():
    qmodel = prepared()
    assert qmodel.enable_qat and isinstance(qmodel.model.conv1, QuantOpr)
    assert all(isinstance(q, Quantizer) for _, q in qmodel.named_quantizers())


def test_feature_match():
    """The loss is what its formula says, is zero for equal models, and reaches the weights."""
    net, x = small_net().eval(), torch.randn(4, 3, 8, 8)
    config = {"BACKEND": "virtual", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 4}}}
    qmodel = sparsebit.quantize(net, [x], config, progress=False)
    qmodel.init_QAT()
    match = sparsebit.qat.FeatureMatch(qmodel, net)
    with pytest.raises(CalibrationError, match="run a batch"):
        match.loss()
    qmodel(x), net(x)
    loss = match.loss()
    assert 0 < float(loss.detach()) < 1
    loss.backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in qmodel.parameters())
    qmodel.set_quant(w_quant=False, a_quant=False)
    qmodel(x), net(x)
    assert float(match.loss().detach()) < 1e-6
    match.remove()
    assert not any(m._forward_pre_hooks for m in net.modules())
    with pytest.raises(ConfigError, match="'nowhere' is not a layer of both"):
        sparsebit.qat.FeatureMatch(qmodel, net, ["nowhere"])


class Dropped(Tiny):
    def forward(self, x):
        x = F.dropout(F.relu(self.bn1(self.conv1(x))), 0.5, self.training)
        return self.fc(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))


def test_functional_dropout_is_on_in_training_only():
    """It was traced in eval mode, and frozen there."""
    model = QuantModel(Dropped().eval(), {"BACKEND": "virtual"}).calibrate([X[0]])
    model.init_QAT()
    assert torch.equal(model.eval()(X[0]), model(X[0]))
    assert not torch.equal(model.train()(X[0]), model(X[0]))  # of batch statistics, which are the same
