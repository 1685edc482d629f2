"""Pruning scripts and plug-ins written for the original Sparsebit, by its public calls only."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import sparsebit
from sparsebit.errors import ConfigError
from sparsebit.sparse import Schedule, SparseModel, parse_sconfig
from sparsebit.sparse.modules import SMODULE_MAP, SConv2d, SLinear, SparseOpr, register_smodule
from sparsebit.sparse.sparsers import SPARSERS_MAP, register_sparser
from sparsebit.sparse.sparsers import Sparser as BaseSparser
from sparsebit.sparse.sparsers.l1norm import Sparser as L1Sparser


# -- a network and a task of the size of a test ------------------------------------------------------------
class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2))
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def pictures(n: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four classes: bright in the red, the green or the blue channel, or striped."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (n,), generator=draw)
    images = torch.randn(n, 3, 8, 8, generator=draw) * 0.5
    for i, label in enumerate(labels.tolist()):
        if label < 3:
            images[i, label] += 1
        else:
            images[i, :, ::2] += 1
    return list(zip(images.split(16), labels.split(16)))


def train(loader, model, optimizer):
    model.train()
    for images, target in loader:
        loss = F.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validate(loader, model) -> float:
    model.eval()
    right = sum(int((model(images).argmax(1) == target).sum()) for images, target in loader)
    return right / sum(len(target) for _, target in loader)


def sconfig(tmp_path: Path, kind: str, strategy: str = "l1norm", ratio: float = 0.5):
    path = tmp_path / "sconfig.yaml"
    path.write_text(f"SPARSER:\n  TYPE: {kind}\n  STRATEGY: {strategy}\n  RATIO: {ratio}\n")
    return parse_sconfig(str(path))


def config(kind: str = "unstructed", strategy: str = "l1norm", ratio: float = 0.5, **more):
    return parse_sconfig({"SPARSER": {"TYPE": kind, "STRATEGY": strategy, "RATIO": ratio, **more}})


# -- the examples ------------------------------------------------------------------------------------------
def test_structured_cifar(tmp_path):
    pytest.importorskip("onnxruntime")
    cfg = sconfig(tmp_path, "structed")
    given = ResNet()
    model = SparseModel(given, cfg).to(cfg.DEVICE)
    model.disable_sparse_before_add()
    model.model.fc.sparser.set_ratio(0.0)
    model.calc_params()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    for _ in range(3):
        train(pictures(128, seed=0), model, optimizer)
    accuracy = validate(pictures(64, seed=1), model)
    assert accuracy > 0.8 and torch.equal(given.fc.weight, model.model.fc.weight)
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, tmp_path / "checkpoint.pth.tar")

    again = SparseModel(ResNet(), cfg)
    again.disable_sparse_before_add()
    again.model.fc.sparser.set_ratio(0.0)
    again.load_state_dict(torch.load(tmp_path / "checkpoint.pth.tar", weights_only=True)["state_dict"])
    assert validate(pictures(64, seed=1), again) == accuracy
    whole = {"conv1", "layer1.0.conv2", "layer1.1.conv2", "layer2.0.conv2", "layer2.0.downsample.0", "fc"}
    masked = {path for path, share in again.sparsity().items() if share > 0}
    kept = {path: again.oprs()[path].w_mask.flatten(1).any(1) for path in whole}
    assert not masked & {"conv1"} and {"layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1"} <= masked
    assert all(bool(channels.all()) for channels in kept.values())
    report = again.eval().export_onnx(torch.randn(1, 3, 8, 8), name=str(tmp_path / "small.onnx"))
    assert report.ok


def test_unstructured_cifar_trains_the_sparse_model_and_saves_the_other(tmp_path):
    cfg = sconfig(tmp_path, "unstructed")
    model = ResNet()
    before = validate(pictures(64, seed=1), model)
    smodel = SparseModel(model, cfg).to(cfg.DEVICE)
    smodel.calc_params()
    optimizer = torch.optim.SGD(smodel.parameters(), 0.05, momentum=0.9)
    for _ in range(3):
        train(pictures(128, seed=0), smodel, optimizer)
    accuracy = validate(pictures(64, seed=1), model)
    assert before < 0.6 < 0.8 < accuracy
    torch.save(model.state_dict(), tmp_path / "model.pth")

    fresh = ResNet()
    fresh.load_state_dict(torch.load(tmp_path / "model.pth", weights_only=True))
    assert validate(pictures(64, seed=1), fresh) == accuracy
    assert int(fresh.bn1.num_batches_tracked) == 24  # statistics of the training that the other one had
    assert validate(pictures(64, seed=1), smodel) > 0.8
    assert all(0.4 < share <= 0.5 for share in smodel.sparsity().values())
    zeros = smodel.compact().conv1.weight == 0
    assert float(zeros.float().mean()) == pytest.approx(0.5, abs=0.02)
    assert not bool((model.conv1.weight == 0).any())  # masks are in the forward of the other


def test_an_optimizer_over_the_parameters_of_the_given_model():
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    smodel = SparseModel(model, config())
    smodel.calc_params()
    for _ in range(3):
        train(pictures(128, seed=0), smodel, optimizer)
    assert validate(pictures(64, seed=1), smodel) > 0.8 and validate(pictures(64, seed=1), model) > 0.8


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="not installed: transformers"
)


def bert(labels: int = 2) -> nn.Module:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
    __import__("zoo_shim").install()  # before transformers looks for torchvision
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=labels, **sizes, **dropouts))


@needs_transformers
def test_unstructured_bert_without_an_example(tmp_path, caplog):
    torch.manual_seed(0)
    model = bert()
    smodel = SparseModel(model, sconfig(tmp_path, "unstructed", ratio=0.25))
    smodel.model.classifier.sparser.set_ratio(0.0)
    smodel.model.bert_encoder_layer_0_attention_self_query.sparser.set_ratio(0.5)
    smodel.calc_params()
    assert smodel.sparsity()["bert.encoder.layer.0.attention.self.query"] == 0.5
    assert smodel.sparsity()["bert.encoder.layer.1.output.dense"] == 0.25
    assert smodel.sparsity()["classifier"] == 0.0
    ids = torch.randint(2, 40, (64, 8))
    target = (ids == 7).any(1).long()
    ids[target == 1, 0] = 7
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    optimizer = torch.optim.AdamW(smodel.parameters(), 3e-3)
    smodel.train()
    for _ in range(20):
        loss = smodel(**batch, labels=target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    smodel.eval()
    model.eval()
    with torch.no_grad():
        assert float((smodel(**batch).logits.argmax(1) == target).float().mean()) > 0.9
        assert float((model(**batch).logits.argmax(1) == target).float().mean()) > 0.8  # without masks
        assert torch.allclose(smodel(ids).logits, smodel(input_ids=ids).logits)
    model.save_pretrained(tmp_path / "bert")
    torch.save(smodel.state_dict(), tmp_path / "smodel.pt")
    again = SparseModel(bert(), smodel.config)
    again.load_state_dict(torch.load(tmp_path / "smodel.pt", weights_only=True))
    with torch.no_grad():
        assert torch.equal(again.eval()(**batch).logits, smodel(**batch).logits)
        small = smodel.compact()
        assert type(small) is type(model)
        torch.testing.assert_close(small(**batch).logits, smodel(**batch).logits)


# -- inputs that no example shows ----------------------------------------------------------------------------
class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x=None, scale=None):
        h = torch.relu(self.a(x))
        return self.b(h if scale is None else h * scale)


@pytest.mark.parametrize("kind", ["unstructed", "structed"])
def test_optional_inputs_are_inputs(kind):
    model, x = Optional().eval(), torch.randn(3, 6)
    smodel = SparseModel(model, config(kind))
    smodel.model.b.sparser.set_ratio(0.0)
    assert torch.allclose(smodel(x), model(x))
    assert torch.allclose(smodel(x=x, scale=torch.tensor(2.0)), model(x, torch.tensor(2.0)))
    smodel.calc_params()
    small = smodel.compact()
    torch.testing.assert_close(small(x), smodel(x))
    assert (smodel.sparsity()["a"], type(small)) == (0.5, Optional)
    assert kind == "unstructed" or small.a.out_features == 4


# -- names -------------------------------------------------------------------------------------------------
def test_layers_by_fx_name_by_index_and_by_path():
    smodel = SparseModel(ResNet(), config("structed"))
    conv = smodel.model.layer1[0].conv1
    assert isinstance(conv, SConv2d) and conv is smodel.model.layer1_0_conv1
    assert conv is smodel.model.get_submodule("layer1.0.conv1") is smodel.oprs()["layer1.0.conv1"]
    assert smodel.model.layer2[-1].downsample[0] is smodel.model.layer2_0_downsample_0
    assert getattr(smodel.model, "layer1.0.conv1") is conv  # as calc_params of the original looked it up
    assert len(smodel.model.layer1) == 2 and not hasattr(smodel.model, "layer9_0")
    for other in (copy.deepcopy(smodel), pickle.loads(pickle.dumps(smodel))):
        found = other.model.layer1_0_conv1
        assert found is other.model.layer1[0].conv1 and found is not conv


def test_layers_of_a_list_by_fx_name():
    smodel = SparseModel(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2))), config())
    assert smodel.model._0 is smodel.model.get_submodule("0")
    assert smodel.model._1_0 is smodel.model.get_submodule("1.0") is getattr(smodel.model, "1")[0]


def test_its_config():
    cfg = config()
    smodel = SparseModel(nn.Sequential(nn.Linear(4, 4)), cfg)
    changed = smodel.config.clone()
    changed.defrost()
    changed.SPARSER.RATIO = 0.25
    assert smodel.config == cfg and (smodel.config.SPARSER.RATIO, changed.SPARSER.RATIO) == (0.5, 0.25)


@pytest.mark.parametrize("name", ["l0norm", "L0Norm", "l0-norm", "l0"])
@pytest.mark.parametrize("keys", [("TYPE", "STRATEGY"), ("STRATEGY", "TYPE")])
def test_l0norm_is_l0(name, keys):
    cfg = parse_sconfig({"SPARSER": {keys[0]: name, keys[1]: "unstructed", "RATIO": 0.5}})
    assert (cfg.SPARSER.TYPE, cfg.SPARSER.STRATEGY) == ("unstructured", "l0")
    both = parse_sconfig({"SPARSER": {"SPECIFIC": [{"0": ["STRATEGY", name]}]}})
    smodel = SparseModel(nn.Sequential(nn.Linear(4, 4)), both)
    assert smodel.oprs()["0"].sparser.strategy == "l0"


# -- parameters that two models share --------------------------------------------------------------------------
def shared(smodel: SparseModel, model: nn.Module) -> bool:
    mine = {t.untyped_storage().data_ptr() for t in (*smodel.parameters(), *smodel.buffers())}
    return all(t.untyped_storage().data_ptr() in mine for t in (*model.parameters(), *model.buffers()))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return F.linear(x, self.w, self.b)


class Kept(nn.Module):
    """Not traced: its forward decides by values. It keeps its weights in a list too."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 6))
        self.weights = [self.a]

    def forward(self, x):
        return x @ self.weights[0] if float(x.sum()) > -1e9 else x


X = torch.randn(3, 6)
MODELS = {
    "resnet": (ResNet, torch.randn(2, 3, 8, 8)),
    "a single layer": (lambda: nn.Linear(6, 4), X),
    "tied": (Tied, torch.randint(0, 12, (2, 3))),
    "lstm": (lambda: nn.Sequential(nn.LSTM(6, 5), nn.Identity()), X),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), torch.randn(2, 3, 6)),
    "functional": (Functional, X),
    "not traced": (lambda: nn.Sequential(nn.Linear(6, 6), Kept()), X),
    "optional input": (Optional, X),
    "parametrized": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))), X),
}


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("kind", ["structed", "unstructed"])
@pytest.mark.parametrize("name", MODELS)
def test_training_one_trains_the_other(name, kind, with_example):
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    smodel = SparseModel(model, config(kind, ratio=0.0), x if with_example else None)
    assert shared(smodel, model)
    first = lambda out: out[0] if isinstance(out, tuple) else out
    optimizer = torch.optim.SGD(smodel.parameters(), 0.01)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        first(smodel(x)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert len(changed) > len(before) / 2
    model.eval(), smodel.eval()
    with torch.no_grad():
        torch.testing.assert_close(first(smodel(x)), first(model(x)))
        for p in model.parameters():
            p.mul_(0.5)
        torch.testing.assert_close(first(smodel(x)), first(model(x)))
        torch.testing.assert_close(first(smodel.compact()(x)), first(model(x)))


@pytest.mark.parametrize("name", MODELS)
def test_they_stay_together(name):
    """Through other types, as through other devices; through files; and in a copy of both."""
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    smodel = SparseModel(model, config("structed"), x).double()
    assert all(t.dtype != torch.float32 for t in (*model.parameters(), *model.buffers()))
    assert shared(smodel, model)
    smodel.float()
    state = {
        key: value + 1 if value.is_floating_point() else value for key, value in smodel.state_dict().items()
    }
    for assign in (False, True):
        smodel.load_state_dict(state, assign=assign)
        assert shared(smodel, model)
        smodel(x)
    others = [copy.deepcopy(smodel)]
    if name != "parametrized":  # torch refuses to pickle such layers
        others.append(pickle.loads(pickle.dumps(smodel)))
    for other in others:
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        assert all(float(p.abs().sum()) > 0 for p in model.parameters())
        assert shared(other, other._hidden["source"])


def test_a_weight_of_an_embedding_and_of_a_linear_layer():
    """Single weights of the linear layer are masked, those of the embedding are not: the result has two weights."""
    model, x = Tied(), torch.randint(0, 12, (2, 3))
    smodel = SparseModel(model, config())
    assert smodel.model.head.weight is smodel.model.embed.weight is model.embed.weight
    smodel.calc_params()
    small = smodel.compact()
    assert torch.equal(small(x), smodel(x)) and torch.equal(small.embed.weight, model.embed.weight)
    assert int((small.head.weight == 0).sum()) == 36
    smodel.set_ratio(0.0)
    smodel.calc_params()
    small = smodel.compact()
    assert small.head.weight is small.embed.weight


@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "prune"])
def test_weights_that_are_computed_cannot_be_shared_and_it_says_so(wrap, caplog):
    layer = nn.Linear(6, 4)
    if wrap == "prune":
        nn.utils.prune.l1_unstructured(layer, "weight", 0.3)
    else:
        getattr(nn.utils, wrap)(layer)
    model = nn.Sequential(layer, nn.Linear(4, 2)).eval()
    smodel = SparseModel(model, config())
    assert "(0.weight)" in caplog.text and "smodel.compact()" in caplog.text
    assert torch.allclose(smodel(X), model(X), atol=1e-6)
    assert smodel.oprs()["1"].weight is model[1].weight


def test_a_shared_buffer_and_the_eval_mode_are_their_own():
    model = ResNet().train()
    smodel = SparseModel(model, config())
    smodel.eval()
    assert model.training and model.bn1.training
    smodel.train()
    smodel(torch.randn(4, 3, 8, 8))
    assert torch.equal(smodel.model.bn1.running_mean, model.bn1.running_mean)
    assert int(model.bn1.num_batches_tracked) == 1


@pytest.mark.parametrize("call", ["prune", "share=False", "tune_batchnorm", "refit", "sparsegpt", "REFIT"])
def test_only_training_changes_the_given_model(call, caplog):
    torch.manual_seed(0)
    model, x = ResNet().eval(), torch.randn(16, 3, 8, 8)
    before = copy.deepcopy(model.state_dict())
    if call == "prune":
        sparsebit.prune(model, x, 0.5, batches=[x], progress=False)
    elif call == "share=False":
        smodel = SparseModel(model, config(), x, share=False)
        with torch.no_grad():
            smodel.model.fc.weight.zero_()
    else:
        kind, strategy = ("unstructed", "sparsegpt") if call == "sparsegpt" else ("structed", "l1norm")
        smodel = SparseModel(model, config(kind, strategy), x)
        parameters = list(smodel.parameters())
        if call in ("sparsegpt", "REFIT"):
            smodel.calibrate([x], progress=False)
        smodel.calc_params()
        if call in ("tune_batchnorm", "refit"):
            getattr(smodel, call)([x])
        assert "take the result from smodel.compact()" in caplog.text
        assert all(p is q for p, q in zip(parameters, smodel.parameters()))  # an optimizer has them
        assert not shared(smodel, model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_refit_looks_at_the_model_as_it_was_given():
    torch.manual_seed(0)
    model, x = ResNet().eval(), torch.randn(64, 3, 8, 8)
    want = model(x).detach()
    smodel = SparseModel(model, config("structed", ratio=0.25), x)
    smodel.calc_params()
    with torch.no_grad():
        smodel.model.fc.weight.mul_(2.0)  # as training might
        smodel.model.fc.bias.add_(1.0)
    error = lambda: float((smodel(x) - want).square().mean().detach())
    worse = error()
    smodel.refit([x[:32], x[32:]])
    assert error() < 0.5 * worse


def test_calibrating_leaves_gradients_alone():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    model(X).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    smodel = SparseModel(model, config("structed", "taylor"), X)
    smodel.calibrate([(X, torch.tensor([0, 1, 2]))])
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before))


# -- additions -----------------------------------------------------------------------------------------------
def test_everything_on_the_way_to_an_addition_up_to_a_convolution():
    smodel = SparseModel(ResNet(), config("structed"))
    smodel.disable_sparse_before_add()
    open_ = {path for path, opr in smodel.oprs().items() if opr.sparser.ratio}
    inner = {
        f"{block}.{layer}" for block in ("layer1.0", "layer1.1", "layer2.0") for layer in ("conv1", "bn1")
    }
    assert open_ == {*inner, "fc"}


ADDS = {
    "+": lambda a, b: a + b,
    "+=": lambda a, b: a.__iadd__(b),
    "torch.add": torch.add,
    "add": lambda a, b: a.add(b),
    "add_": lambda a, b: a.add_(b),
}


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
@pytest.mark.parametrize("add", ADDS)
def test_forms_of_additions_and_convolutions(add, kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.far, self.near, self.norm = kind(4, 4, 1), kind(4, 4, 1), nn.GroupNorm(2, 4)
            self.other, self.mixed = nn.Linear(4, 4), kind(4, 4, 1)

        def forward(self, x):
            near = self.near(torch.relu(self.far(x)))
            other = self.other(self.mixed(x).movedim(1, -1)).movedim(-1, 1)
            return ADDS[add](torch.cat([self.norm(near).sigmoid(), x], 1)[:, :4], other)

    smodel = SparseModel(Net(), config("structed"))
    smodel.disable_sparse_before_add()
    assert {path for path, opr in smodel.oprs().items() if opr.sparser.ratio} == {"far"}


def test_deep_residual_nets_are_walked_once():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(120))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x) + layer(x)
            return x

    smodel = SparseModel(Deep(), config("structed"))
    start = time.process_time()
    smodel.disable_sparse_before_add()
    assert time.process_time() - start < 5
    assert not any(opr.sparser.ratio for opr in smodel.oprs().values())


# -- the steps of the constructor ------------------------------------------------------------------------------
def test_the_steps_are_called_in_order():
    class Noted(SparseModel):
        def _run_simplifiers(self):
            self.seen = ["simplify"]
            assert not any(isinstance(m, SparseOpr) for m in self.model.modules())
            super()._run_simplifiers()

        def _convert2sparsemodule(self):
            self.seen.append("convert")
            super()._convert2sparsemodule()
            assert all(m.sparser is None for m in self.model.modules() if isinstance(m, SparseOpr))

        def _build_sparser(self):
            self.seen.append("build")
            for name, module in self.model.named_modules():
                if isinstance(module, SparseOpr):
                    _config = self.config.clone()
                    if name == "fc":
                        _config.defrost()
                        _config.SPARSER.RATIO = 0.25
                    module.build_sparser(_config)

    smodel = Noted(ResNet(), config())
    smodel.calc_params()
    assert smodel.seen == ["simplify", "convert", "build"]
    assert (smodel.sparsity()["fc"], smodel.sparsity()["conv1"]) == (0.25, 0.5)


class AsInTheNotes(SparseModel):
    """_convert2sparsemodule and calc_params as the notes on the original have them."""

    def _convert2sparsemodule(self):
        named_modules = dict(self.model.named_modules(remove_duplicate=False))
        traced = self.model
        for n in list(traced.graph.nodes):
            if n.op != "call_module" or type(named_modules[n.target]) not in SMODULE_MAP:
                continue
            new_module = SMODULE_MAP[type(named_modules[n.target])](named_modules[n.target])
            with traced.graph.inserting_after(n):
                traced.add_module(n.name, new_module)
                new_node = traced.graph.call_module(n.name, n.args, n.kwargs)
                n.replace_all_uses_with(new_node)
                traced.graph.erase_node(n)
        traced.recompile()
        self.model = fx.GraphModule(traced, traced.graph)

    def calc_params(self):
        pre_mask = None
        for node in self.model.graph.nodes:
            if node.op == "call_module":
                module = getattr(self.model, node.target, None)
                if isinstance(module, SparseOpr) and getattr(module, "sparser", None):
                    pre_mask = module.calc_mask(pre_mask)


@pytest.mark.parametrize("kind", ["structed", "unstructed"])
def test_a_conversion_that_keeps_layers_by_fx_name(kind):
    torch.manual_seed(0)
    model, x = ResNet().eval(), torch.randn(2, 3, 8, 8)
    smodel = AsInTheNotes(model, config(kind))
    smodel.disable_sparse_before_add()
    smodel.model.layer1_0_conv1.sparser.set_ratio(0.25)
    smodel.calc_params()
    first = smodel.model.layer1_0_conv1.w_mask
    assert float(first.float().mean()) == pytest.approx(0.75, abs=0.01)
    assert kind == "unstructed" or torch.equal(smodel.model.layer1_0_bn1.mask, first.flatten(1).any(1))
    SparseModel.calc_params(smodel)
    out, small = smodel(x), smodel.compact()
    torch.testing.assert_close(small(x), out, rtol=1e-4, atol=1e-5)
    assert smodel.model.layer1[0].conv1.weight is model.layer1[0].conv1.weight
    plain = SparseModel(ResNet().eval(), config(kind), x)
    plain.load_state_dict(smodel.state_dict())
    assert torch.equal(plain(x), out)
    if kind == "structed":
        assert small.layer1[0].conv1.out_channels == 6


# -- state dicts of the original ---------------------------------------------------------------------------------
def originals(smodel: SparseModel, wrapped: bool) -> dict[str, torch.Tensor]:
    """As the original wrote it: layers by fx name, float masks, none of batch norms."""
    found = {}
    for key, value in smodel.state_dict().items():
        path, _, name = key.removeprefix("model.").rpartition(".")
        opr = smodel.oprs()[path]
        if not isinstance(opr, (nn.Conv2d, nn.Linear)):
            if "mask" in name:
                continue
            path += ".module" * wrapped
        layer = ".module".join(part.replace(".", "_") for part in path.split(".module"))
        found[f"model.{layer}.{name}"] = value.float() if "mask" in name else value.clone()
    for path, opr in smodel.oprs().items():
        if isinstance(opr, nn.Conv2d):
            found[f"model.{path.replace('.', '_')}.b_mask"] = torch.ones(opr.out_channels)
    return found


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_dicts_of_the_original_load(wrapped):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    smodel = SparseModel(ResNet().eval(), config("structed"), x)
    with torch.no_grad():
        for p in smodel.parameters():
            p.normal_()  # norms that shift too: their masks count
    smodel.disable_sparse_before_add()
    smodel.calc_params()
    state = originals(smodel, wrapped)
    assert ("model.bn1.module.weight" in state) is wrapped and "model.layer1_0_conv1.w_mask" in state
    again = SparseModel(ResNet().eval(), config("structed"))
    again.load_state_dict(state)
    torch.testing.assert_close(again(x), smodel(x))
    with pytest.raises(RuntimeError, match="layer9"):
        again.load_state_dict({**state, "model.layer9.weight": torch.zeros(1)})
    del state["model.conv1.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*conv1\.weight"):
        again.load_state_dict(state)


# -- plug-ins ----------------------------------------------------------------------------------------------------
@pytest.fixture
def registries():
    saved = [dict(registry._items) for registry in (SMODULE_MAP, SPARSERS_MAP)]
    yield
    for registry, items in zip((SMODULE_MAP, SPARSERS_MAP), saved):
        registry._items.clear()
        registry._items.update(items)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def original_sparser(name: str):
    """The smallest output channels, or the smallest weights, with the config of the original."""

    @register_sparser
    class Sparser(BaseSparser):
        STRATEGY = name

        def __init__(self, config, opr):
            super().__init__(config, opr)
            assert config.SPARSER.RATIO == 0.5 and config.SPARSER.TYPE in ("structed", "unstructed")

        def calc_mask(self, x):
            mask = torch.ones_like(x)
            if self.type == "structed":
                order = x.abs().flatten(1).sum(1).argsort()
                mask[order[: int(len(x) * self.ratio)]] = 0
                return mask
            return mask * (x.abs() > x.abs().flatten().sort().values[int(x.numel() * self.ratio)])

    return Sparser


def test_a_sparser_with_calc_mask_prunes_single_weights(registries):
    original_sparser("own_smallest")
    model, x = two_layers(), torch.randn(2, 3, 8, 8)
    smodel = SparseModel(model, config("unstructed", "own_smallest"))
    smodel.calc_params()
    weight = model[0].weight.detach()
    line = weight.abs().flatten().sort().values[108]
    assert torch.equal(smodel.oprs()["0"].w_mask, weight.abs() > line)
    torch.testing.assert_close(smodel.compact()(x), smodel(x))
    schedule = Schedule(smodel, steps=2, shape="linear")
    shares = []
    for _ in range(3):
        schedule.step()
        shares.append(smodel.sparsity()["0"])
    assert shares == pytest.approx([0.25, 0.5, 0.5], abs=0.01)


def test_a_sparser_with_calc_mask_decides_on_channels(registries):
    original_sparser("own_channels")
    model, x = two_layers(), torch.randn(2, 3, 8, 8)
    smodel = SparseModel(model, config("structed", "own_channels"))
    smodel.calc_params()
    out, small = smodel(x), smodel.compact()
    worth = model[0].weight.detach().abs().flatten(1).sum(1)
    kept = worth.argsort()[4:].sort().values
    assert torch.equal(small[0].weight, model[0].weight[kept])
    assert (small[1].num_features, small[3].in_channels, small[3].out_channels) == (4, 4, 4)
    torch.testing.assert_close(small(x), out, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="macs: a budget needs a sparser with weights"):
        smodel.calc_params(macs=0.5)
    smodel.set_ratio(0.0)
    smodel.calc_params()
    assert torch.equal(smodel(x), model(x))


@pytest.mark.parametrize(
    "kind, mask, message",
    [
        (
            "structed",
            lambda x: x > 0,
            "0.weight: calc_mask of Sparser masks single weights, and TYPE is struct",
        ),
        ("structed", torch.zeros_like, "calc_mask: masks every channel"),
        ("unstructed", lambda x: None, "must return a tensor, got NoneType"),
        (
            "unstructed",
            lambda x: x[:2] > 0,
            r"must return a mask of the shape \[8, 3, 3, 3\], got \[2, 3, 3, 3\]",
        ),
        ("unstructed", torch.sigmoid, "must return zeros and ones"),
    ],
)
def test_masks_that_cannot_be_used(registries, kind, mask, message):
    @register_sparser
    class Sparser(BaseSparser):
        STRATEGY = "own_wrong"

        def calc_mask(self, x):
            return mask(x)

    smodel = SparseModel(two_layers(), config(kind, "own_wrong"), torch.randn(1, 3, 8, 8))
    with pytest.raises(ConfigError, match=message):
        smodel.calc_params()


def test_a_sparser_over_a_built_in_class(registries):
    """What the subclass defines counts, and it may ask the built-in one."""

    @register_sparser
    class Sparser(L1Sparser):
        STRATEGY = "own_l1"

        def calc_mask(self, x):
            return super().calc_mask(x).float()

    for kind in ("structed", "unstructed"):
        own, built_in = (
            SparseModel(two_layers(), config(kind, s), torch.randn(1, 3, 8, 8)) for s in ("own_l1", "l1norm")
        )
        own.calc_params()
        built_in.calc_params()
        assert own.oprs()["0"].sparser.decides and not built_in.oprs()["0"].sparser.decides
        assert own.sparsity()["0"] == built_in.sparsity()["0"] == 0.5


def register_original_layers():
    """A convolution, a linear layer and a batch norm as the original had them."""

    @register_smodule(sources=[nn.Conv1d])
    class SConv1d(SparseOpr):
        def __init__(self, org_module, config=None):
            super().__init__()
            self.cfg = config
            self.fwd_kwargs = {"stride": org_module.stride, "padding": org_module.padding}
            self.weight, self.bias = org_module.weight, org_module.bias
            self.register_buffer("w_mask", torch.ones_like(self.weight))
            self.register_buffer("b_mask", torch.ones_like(self.bias))
            self._repr_info = "SConv1d"

        def calc_mask(self, pre_mask):
            mask = self.sparser.calc_mask(self.weight)
            self.w_mask.data.copy_(mask.data)
            if self.sparser.type != "structed":
                return None
            self.b_mask.data.copy_(mask.flatten(1).any(1))
            return self.b_mask.clone()

        def forward(self, x_in, *args):
            return F.conv1d(x_in, self.weight * self.w_mask, self.bias * self.b_mask, **self.fwd_kwargs)

    @register_smodule(sources=[nn.BatchNorm1d])
    class SBatchNorm1d(SparseOpr):
        def __init__(self, org_module):
            super().__init__()
            self.module, self.mask = org_module, None

        def calc_mask(self, pre_mask):
            self.mask = pre_mask
            return pre_mask

        def forward(self, x_in, *args):
            out = self.module(x_in)
            return out if self.mask is None else out * self.mask.view(1, -1, 1)

    return SConv1d, SBatchNorm1d


def signals() -> nn.Module:
    torch.manual_seed(0)
    first = (nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
    model = nn.Sequential(*first, nn.Conv1d(8, 6, 3), nn.Flatten(), nn.Linear(24, 4)).eval()
    with torch.no_grad():
        model[1].bias.normal_()
    return model


@pytest.mark.parametrize("kind", ["structed", "unstructed"])
def test_layers_of_the_original_form(registries, kind):
    SMODULE_MAP._items.pop(nn.Conv1d)
    conv, norm = register_original_layers()
    model, x = signals(), torch.randn(2, 3, 8)
    want = model(x)
    smodel = SparseModel(model, config(kind))
    assert type(smodel.model._0) is conv and type(smodel.model._1) is norm
    assert torch.allclose(smodel(x), want)
    smodel.model._5.sparser.set_ratio(0.0)
    smodel.calc_params()
    out = smodel(x)
    assert smodel.sparsity()["0"] == 0.5 and smodel.model._0.weight is model[0].weight
    if kind == "structed":
        gone = smodel.model._0.w_mask.flatten(1).sum(1) == 0
        assert torch.equal(smodel.model._1.mask == 0, gone) and int(gone.sum()) == 4
    torch.testing.assert_close(smodel.compact()(x), out, rtol=1e-4, atol=1e-5)
    optimizer = torch.optim.SGD(smodel.parameters(), 0.1)
    out.sum().backward()
    optimizer.step()
    assert not torch.allclose(model(x), want)
    again = SparseModel(signals(), config(kind), x)
    again.load_state_dict(smodel.state_dict())


def test_a_layer_over_a_built_in_one(registries):
    class Doubled(SLinear):
        def calc_mask(self, pre_mask):
            super().calc_mask(pre_mask)
            self.w_mask[0] = True

    SMODULE_MAP._items[nn.Linear] = Doubled  # as register_smodule over a built-in one
    model = nn.Sequential(nn.Linear(6, 4))
    smodel = SparseModel(model, config("unstructed", ratio=0.75))
    smodel.calc_params()
    assert bool(smodel.model._0.w_mask[0].all()) and 0.5 < smodel.sparsity()["0"] < 0.75
