"""Names of the original's passes: classes whose apply() does the pass, and lists of tasks that users extend."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch import fx, nn

from models import images, small_net
from sparsebit.errors import GraphError
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.converters import fuse_operations, simplify
from sparsebit.quantization.converters.fuse_operations.disable_unnecessary_quant import (
    ReplacePattern_DisableQuant,
    ReplacePatterns,
    make_chain_connection,
)
from sparsebit.quantization.converters.fuse_operations.fuse_bn import ReplacePattern as FuseBn
from sparsebit.quantization.converters.fuse_operations.lists import lists
from sparsebit.quantization.converters.simplifiers import lists as simplifier_lists
from sparsebit.quantization.converters.simplifiers.getattr_to_shape import ReplacePattern as GetattrToShape
from sparsebit.quantization.converters.simplifiers.remove_identity import ReplacePattern as RemoveIdentity
from sparsebit.quantization.converters.simplifiers.unbind_getitem_to_subtensor import (
    ReplacePattern as UnbindToSubtensor,
)
from sparsebit.quantization.converters.utils import MatchingNode, ReplacePatternBase
from sparsebit.quantization.modules import QConv2d, QLinear, QMul, QReLU, QTanh
from sparsebit.quantization.observers.kl_histogram import get_best_threshold
from sparsebit.quantization.observers.utils import mse_loss
from sparsebit.quantization.utils import fx_symbolic_trace

OFF = {"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": False, "DISABLE_UNNECESSARY_QUANT": False}}


# -- classes ---------------------------------------------------------------------------------------------
def test_fuse_bn() -> None:
    net, (x, *_) = small_net(), images()
    qmodel = QuantModel(net, OFF)
    pattern = FuseBn()
    assert isinstance(pattern, ReplacePatternBase)
    assert pattern.apply(qmodel.model) is True
    assert not any("BatchNorm" in type(m).__name__ for m in qmodel.model.modules())
    assert qmodel.model.conv1_bn is qmodel.model.conv1
    torch.testing.assert_close(qmodel(x), net(x), rtol=1e-4, atol=1e-5)
    assert pattern.apply(qmodel.model) is False


@pytest.mark.parametrize(
    ("pattern", "function", "gone"),
    [
        (GetattrToShape, lambda x: x.reshape(x.shape[0], x.shape[1] * 4), getattr),
        (UnbindToSubtensor, lambda x: x.unbind(0)[0] - torch.unbind(x, 0)[1], torch.unbind),
    ],
)
def test_simplifiers(pattern, function, gone) -> None:
    gm, x = fx.symbolic_trace(function), torch.randn(2, 3, 4)
    assert issubclass(pattern, ReplacePatternBase)
    assert pattern().apply(gm) is True
    assert gone not in [node.target for node in gm.graph.nodes]
    assert torch.equal(gm(x), function(x))
    assert pattern().apply(gm) is False


def test_remove_identity() -> None:
    kept = nn.Identity()
    kept.remove = False
    gm = fx.symbolic_trace(nn.Sequential(nn.Identity(), nn.Flatten(), kept))
    assert RemoveIdentity().apply_once(gm) is True
    assert [node.name for node in gm.graph.nodes][1:-1] == ["_1", "_2"]


def test_a_built_in_class_has_no_pattern_to_change() -> None:
    with pytest.raises(GraphError, match=r"Mine overrides make_nodes.*derive it from ReplacePatternBase"):

        class Mine(FuseBn):
            def make_nodes(self):
                return []


def absorbed(qmodel: QuantModel) -> list[str]:
    return [
        name
        for name, m in qmodel.named_modules()
        if getattr(m, "input_quantizer", None) is not None and m.input_quantizer.absorbed
    ]


class Activations(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.silu, self.fc = (
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.SiLU(),
            nn.Linear(4, 4),
        )
        self.relu, self.gelu = nn.ReLU(), nn.GELU()

    def forward(self, x):
        x = self.silu(self.conv(x))
        x = self.relu(self.norm(x) + x)
        return self.gelu(self.fc(x.mean((2, 3))))


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime"])
@pytest.mark.parametrize("form", ["class", "patterns"])
def test_disable_quant_does_what_the_pass_does(backend, form) -> None:
    config = {**OFF, "BACKEND": backend, "A": {"QADD": {"ENABLE_QUANT": True}}}
    qmodel = QuantModel(Activations().eval(), config)
    assert not {"model.relu", "model.gelu"} & set(absorbed(qmodel))
    for pattern in ReplacePatterns if form == "patterns" else [ReplacePattern_DisableQuant()]:
        pattern.apply(qmodel.model)
    config["SCHEDULE"] = {"DISABLE_UNNECESSARY_QUANT": True}
    assert absorbed(qmodel) == absorbed(QuantModel(Activations().eval(), config))
    assert "model.gelu" in absorbed(qmodel)
    assert ("model.silu" in absorbed(qmodel)) == (backend == "virtual")
    assert ReplacePattern_DisableQuant().apply(qmodel.model) is False


def test_a_chain_of_the_user() -> None:
    qmodel = QuantModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU()), OFF)
    chain = make_chain_connection([QLinear, (QTanh, QReLU)])
    assert [(node.name, node.inputs) for node in chain] == [("op_0", []), ("op_1", ["op_0"])]
    assert ReplacePattern_DisableQuant(chain).apply(qmodel.model) is True
    assert absorbed(qmodel) == ["model._1", "model._3"]


# -- lists -----------------------------------------------------------------------------------------------
class HalveScale(ReplacePatternBase):
    """A task of a user: layer(x) * 2.0 becomes the layer."""

    def make_nodes(self):
        return [
            MatchingNode("layer", [None], [QConv2d, QLinear]),
            MatchingNode("mul", ["layer"], [QMul]),
        ]

    def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
        with torch.no_grad():
            modules_dict["layer"].weight.mul_(2)
            modules_dict["layer"].bias.mul_(2)
        return {"mul": nodes_dict["layer"]}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) * 2.0


@pytest.fixture(params=["ReplacePattern", "ReplacePatterns"])
def own_task(request, monkeypatch) -> str:
    """A file `halve_scale.py` of the user."""
    module = ModuleType("halve_scale")
    setattr(module, request.param, HalveScale if request.param == "ReplacePattern" else [HalveScale])
    monkeypatch.setitem(sys.modules, "halve_scale", module)
    return "halve_scale"


def muls(gm: nn.Module) -> int:
    return sum(isinstance(m, QMul) for m in gm.modules())


def test_lists_name_the_tasks_in_order() -> None:
    assert lists == [
        "equalize_sums",
        "fuse_bn",
        "disable_unnecessary_quant",
        "softmax_in_float",
        "integer_outputs",
        "equalize",
        "one_grid",
        "wholly_float",
        "known_ranges",
    ]
    originals = ["remove_identity", "getattr_to_shape", "unbind_getitem_to_subtensor"]
    assert [name for name in simplifier_lists.lists if name in originals] == originals


def test_a_task_that_the_user_appends(own_task, monkeypatch) -> None:
    net, x = Scaled(), torch.randn(2, 4)
    assert muls(QuantModel(net, OFF).model) == 1
    monkeypatch.setattr(sys.modules[f"{FUSIONS}.lists"], "lists", [*lists, own_task])
    qmodel = QuantModel(net, OFF)
    assert muls(qmodel.model) == 0
    torch.testing.assert_close(qmodel(x), net(x))
    off = {"BACKEND": "virtual", "SCHEDULE": {"HALVE_SCALE": False}}
    qmodel = QuantModel(net, off)
    assert muls(qmodel.model) == 1
    fuse_operations(qmodel.model, qmodel.cfg.SCHEDULE)
    assert muls(qmodel.model) == 1
    fuse_operations(qmodel.model, {})
    assert muls(qmodel.model) == 0


def test_custom_lists(own_task) -> None:
    qmodel = QuantModel(Scaled(), OFF)
    fuse_operations(qmodel.model, qmodel.cfg.SCHEDULE, custom_lists=["fuse_bn", own_task])
    assert muls(qmodel.model) == 0
    with pytest.raises(
        GraphError, match=r"there is no task 'fuse_nb'; built in are equalize_sums, fuse_bn, "
    ):
        fuse_operations(qmodel.model, {}, custom_lists=["fuse_nb"])
    with pytest.raises(GraphError, match=r"task 'models': .* has no ReplacePattern"):
        fuse_operations(qmodel.model, {}, custom_lists=["models"])


def test_a_task_whose_import_fails_says_so(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_task.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        fuse_operations(QuantModel(Scaled(), OFF).model, {}, custom_lists=["broken_task"])


def test_a_task_that_leaves_the_list_does_not_run(monkeypatch) -> None:
    config = parse_qconfig({"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}})
    qmodel = QuantModel(small_net(), OFF)
    monkeypatch.setattr(sys.modules[f"{FUSIONS}.lists"], "lists", ["disable_unnecessary_quant"])
    fuse_operations(qmodel.model, config.SCHEDULE)
    assert any("BatchNorm" in type(m).__name__ for m in qmodel.model.modules())


def test_simplify_runs_the_tasks_of_its_list(monkeypatch) -> None:
    class DropDropout(ReplacePatternBase):
        def make_nodes(self):
            return [MatchingNode("drop", [None], [nn.Dropout])]

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            return {"drop": nodes_dict["drop"].args[0]}

    module = ModuleType("drop_dropout")
    module.ReplacePattern = DropDropout
    monkeypatch.setitem(sys.modules, "drop_dropout", module)
    monkeypatch.setattr(simplifier_lists, "lists", [*simplifier_lists.lists, "drop_dropout"])
    gm = simplify(nn.Sequential(nn.Dropout(), nn.Flatten()))
    assert [node.name for node in gm.graph.nodes][1:-1] == ["_1"]


# -- other names -----------------------------------------------------------------------------------------
FUSIONS = "sparsebit.quantization.converters.fuse_operations"


def test_packages_hold_their_files() -> None:
    package = importlib.import_module(FUSIONS)
    assert package.fuse_operations is fuse_operations
    assert package.fuse_bn.ReplacePattern is FuseBn  # the file, not the pass


def test_small_functions() -> None:
    assert mse_loss(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])) == 2.0
    net = nn.Sequential(nn.ReLU())
    gm = fx_symbolic_trace(net)
    assert isinstance(gm, fx.GraphModule)
    assert fx_symbolic_trace(gm) is gm


def test_get_best_threshold() -> None:
    data = torch.randn(20000)
    with_outlier = torch.cat([data, torch.tensor([50.0])])
    assert 3 < get_best_threshold(data) <= data.abs().max()
    assert 3 < get_best_threshold(with_outlier, bit=8) < 5  # D2: it depends on the data
    assert get_best_threshold(data.numpy(), 4) < get_best_threshold(data, 8)
    assert get_best_threshold(torch.zeros(3)) == 0
    assert get_best_threshold(torch.full((3,), -2.0)) == 2
