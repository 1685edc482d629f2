"""SparseModel: a model with masks. Choose channels or weights, train, and remove them with `compact()`.

    smodel = SparseModel(model, config, example)
    smodel.calibrate(batches, loss)      # if the sparser needs data
    smodel.calc_params()                 # masks
    small = smodel.compact()             # an ordinary, smaller module

There are two graphs. `model` runs and has masked layers. A plain graph has the labels and is cut. The masks
are the only record of the removed positions. The parameters are those of the user's model (trace/sharing.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.graph.run.batches import Batches
from sparsebit.graph.run.calls import Call, device_of
from sparsebit.graph.run.modes import evaluating, set_training, training_flags
from sparsebit.graph.trace import own_copy, unwrapped
from sparsebit.sparse.checkpoints import as_written_here
from sparsebit.sparse.choose.additions import layers_before_additions
from sparsebit.sparse.choose.calibrate import show
from sparsebit.sparse.choose.channels import Amount, choose_channels
from sparsebit.sparse.choose.plugin_masks import ask_layers
from sparsebit.sparse.choose.single_weights import mask_single_weights
from sparsebit.sparse.cut import masks
from sparsebit.sparse.cut.masked_graph import MaskedGraph, at_paths
from sparsebit.sparse.cut.surgery import Cut
from sparsebit.sparse.labels.walk import Walk
from sparsebit.sparse.mend.batch_norm import reestimate
from sparsebit.sparse.mend.layerwise import fit
from sparsebit.sparse.mend.one_shot import refit
from sparsebit.sparse.plan import Plan, compact_with_plan
from sparsebit.sparse.sparse_config import SparseConfig
from sparsebit.sparse.sparsers import Sparser
from sparsebit.sparse.trace import sharing
from sparsebit.sparse.trace.front_end import (
    call_of,
    first_graph,
    first_is_optional,
    guarded,
    has_optional,
    one_node,
    simplified,
    traced,
)
from sparsebit.sparse.trace.names import inside_of_whole
from sparsebit.utils.device import usable_device

log = logging.getLogger("sparsebit")


class SparseModel(nn.Module):
    """`model` with masks, over the same parameters: training one trains the other.

    model    an nn.Module. It follows the SparseModel: training, load_state_dict(), to(device). Its own forward has no
             masks. When Sparsebit sets weights (refit, tune_batchnorm, sparsegpt), the two get separate parameters.
    config   a SparseConfig, a YAML path or a mapping.
    example  a tensor, a tuple of arguments or a mapping; without one, the first forward shows the shapes.
    share    False: work on a copy and never change `model`, like sparsebit.prune.

    The constructor runs these steps: _trace, _run_simplifiers, _convert2sparsemodule, _build_sparser. A
    subclass may replace each of them; they read and write `self.model`.
    """

    model: fx.GraphModule

    def __init__(self, model: nn.Module, config: Any = None, example: Any = None, *, share: bool = True):
        super().__init__()
        self.cfg = SparseConfig.load({} if config is None else config)
        self.config = self.cfg  # the original's name
        self.device = usable_device(self.cfg.device)
        if example is None:
            self.example = None
        else:
            self.example = call_of(example, model)
        model = unwrapped(model)
        self._hidden: dict[str, Any] = {"source": model, "given": model, "walk": None, "links": {}}
        self._waiting: dict[str, Any] | None = None  # a calc_params() that needs to see an input first
        self._shown = False
        self.model = self._trace(model)
        origins = sharing.Origins(self.model, model)
        self._run_simplifiers()
        self._finish_plain(origins if share else None)
        self._convert2sparsemodule()
        self.model = at_paths(self.model, self._hidden["plain"])
        self._build_sparser()
        if share:
            self._hidden["links"] = sharing.links_between(self.model, model)
        masks.warn_of_unmatched(self.model, self.cfg)
        self.training = model.training
        self.to(self.device)

    # -- the steps of the constructor ----------------------------------------------------------------
    def _trace(self, model: nn.Module) -> fx.GraphModule:
        """The graph of the model; a single node if calls may use inputs that the trace would leave out."""
        why = "nothing shows which of its optional inputs are used; give an example"
        if self.example is None and first_is_optional(model):
            self._hidden["unshown"] = True
            return one_node(model, why)
        gm = first_graph(model, self.example)
        if self.example is None and self.cfg.sparser.type == "unstructured" and has_optional(gm):
            self._hidden.update(plain=guarded(gm), unshown=True)
            return one_node(model, why)
        return gm

    def _run_simplifiers(self) -> None:
        """Bring the graph into the form that channel rules know."""
        self.model = simplified(self.model, self.example)

    def _convert2sparsemodule(self) -> None:
        """Replace layers by masked ones over the same parameters."""
        masks.put_masks(self.model)

    def _build_sparser(self) -> None:
        """Give every masked layer its sparser."""
        masks.build_sparsers(self.model, self.cfg)

    def _finish_plain(self, origins: sharing.Origins | None) -> None:
        """Keep the graph, and continue with a copy of it. With `origins`, both use the tensors of the user's
        model."""
        plain = guarded(self.model)
        source = self._hidden["source"]
        self._hidden.setdefault("plain", plain)
        if origins is None:
            sharing.own_memory(plain)
        else:
            # refit() compares with this copy, because training changes the model
            if self.cfg.sparser.type == "structured":
                self._hidden["given"] = own_copy(source)
            sharing.share(plain, source, origins)
        self.model = sharing.copy_over_same(plain)

    # -- the parameters that it shares ---------------------------------------------------------------
    def _apply(self, fn: Any, recurse: bool = True) -> SparseModel:
        """`.to(device)` and the like make new tensors; the user's model gets them too."""
        super()._apply(fn, recurse)
        sharing.follow(self.model, self._hidden["source"], self._hidden["links"])
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """State dicts of the original are accepted: `model.layer1_0.weight`, `model.bn1.module.weight`."""
        found = super().load_state_dict(as_written_here(self, state_dict), strict, assign)
        sharing.follow(self.model, self._hidden["source"], self._hidden["links"])
        return found

    def _part(self, what: str) -> None:
        """Separate the parameters before Sparsebit sets weights: the user's model keeps its own."""
        if self._hidden["links"]:
            sharing.part(self._hidden["source"], self._hidden["links"], what)
            self._hidden["links"] = {}

    # -- the layers ----------------------------------------------------------------------------------
    def oprs(self) -> dict[str, Any]:
        """The masked layers, by module path."""
        return masks.oprs_of(self.model)

    def set_ratio(self, ratio: float) -> None:
        """Set one ratio for every layer; for a single one use `smodel.model.conv1.sparser.set_ratio(0.3)`."""
        for opr in self.oprs().values():
            opr.sparser.set_ratio(ratio)

    def disable_sparse_before_add(self) -> None:
        """Keep the whole output of layers in front of an addition, up to the last convolution before it."""
        oprs = self.oprs()
        gm = self.calls()
        if "" in gm.meta.get("islands", {}):
            log.warning("disable_sparse_before_add: the model is not traced; its additions are not known")
        for path in layers_before_additions(gm, oprs):
            oprs[path].sparser.set_ratio(0.0)

    def calls(self) -> fx.GraphModule:
        """The graph with the calls of all layers, also if the model runs as a single node."""
        plain: fx.GraphModule = self._hidden["plain"]
        if self._hidden.get("unshown"):
            return plain
        return self.model

    # -- data ----------------------------------------------------------------------------------------
    def prepare_calibration(self) -> None:
        """Kept for old scripts: calibrate() does everything."""

    def calibrate(self, batches: Any, loss: Any = None, progress: bool | None = None) -> SparseModel:
        """Show batches to the sparsers that need data; choose/calibrate.py describes `loss(output, target)`."""
        show(self, self.oprs(), batches, loss, progress)
        self._shown = True
        return self

    def tune_batchnorm(self, batches: Any, progress: bool | None = None) -> SparseModel:
        """Estimate the statistics of batch norms again for the masked model; needs no targets."""
        self._part("tune_batchnorm")
        calls = Batches(self, batches, progress, "pruning", once=True)
        with calls.named():
            reestimate(self, calls)
        return self

    def refit(self, batches: Any, whole: Any = None, progress: bool | None = None) -> SparseModel:
        """Fit the layers with fewer inputs than before to the outputs of `whole`, by default the original model.

        Call it after calc_params(). It needs no targets; mend/layerwise.py explains the method.
        """
        if self.cfg.sparser.type == "unstructured":
            raise ConfigError("refit: needs whole channels to be pruned; TYPE is unstructured")
        if self.example is None:
            raise ConfigError("refit: needs an example input first: SparseModel(model, config, example)")
        if whole is None:
            source: nn.Module = self._hidden["given"]
        else:
            source = whole
        self._part("refit")
        device = device_of(source) or self.device
        whole = traced(source, self.example.to(device)).to(self.device).eval()
        calls = Batches(self.model, batches, False, "refit")
        with evaluating(self), calls.named():
            fit(self.model, whole, calls, progress)
        return self

    def penalty(self) -> Tensor:
        """The term that sparsers which learn (slimming, l0) add to the training loss."""
        terms = [opr.sparser.penalty(opr) for opr in self.oprs().values()]
        found = [term for term in terms if term is not None]
        if found:
            return torch.stack(found).sum()
        return torch.zeros((), device=self.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.example is None:
            self.example = Call(args, kwargs).map(lambda t: t.detach().clone())
        if self._waiting is not None:
            waiting = self._waiting
            self._waiting = None
            SparseModel.calc_params(self, **waiting)  # a subclass may define another calc_params()
        return self.model(*args, **kwargs)

    # -- masks -------------------------------------------------------------------------------------
    @torch.no_grad()
    def calc_params(
        self,
        example: Any = None,
        *,
        share: float = 1.0,
        macs: float | None = None,
        params: float | None = None,
        latency: float | None = None,
        progress: bool | None = False,
    ) -> None:
        """Set the masks: every layer loses the ratio of its sparser, or all layers lose what a budget
        requires.

        share    the part of the ratios that is due; a schedule raises it from 0 to 1.
        macs, params, latency   the share of the whole model that may remain.
        progress show a bar during the search for a budget; None: only on a terminal.
        Structured pruning needs shapes: without an example, the masks come with the next forward.
        """
        wants = next((o.sparser.NEEDS for o in self.oprs().values() if o.sparser.NEEDS), "")
        if wants and not self._shown:
            with_loss = ", loss" if wants == "gradients" else ""
            raise CalibrationError(
                f"{self.cfg.sparser.strategy} decides by data: call calibrate(batches{with_loss}) before "
                f"calc_params(), or pass batches to sparsebit.prune"
            )
        if example is not None:
            self.example = call_of(example, self)
        budget = {}
        for k, v in (("macs", macs), ("params", params), ("latency", latency)):
            if v is not None:
                budget[k] = v
        if budget and share != 1.0:
            raise ConfigError(
                f"share: scales the ratios, and {next(iter(budget))} is a budget; leave out one"
            )
        if self.cfg.sparser.type == "unstructured":
            if budget:
                raise ConfigError(f"{next(iter(budget))}: a budget needs TYPE: structured; set RATIO instead")
            if any(type(opr.sparser).solve is not Sparser.solve for opr in self.oprs().values()):
                self._part(self.cfg.sparser.strategy)
            self.reset_masks()
            mask_single_weights(self.oprs(), share)
            ask_layers(self.calls(), self.oprs(), share)
        elif self.example is None:
            self._waiting = {"share": share, **budget}
        else:
            self._mask_channels(share, budget, progress)

    def _mask_channels(self, share: float, budget: Mapping[str, float], progress: bool | None) -> None:
        oprs = self.oprs()
        section = self.cfg.sparser
        walk = self.walk()
        decided = ask_layers(self.calls(), oprs, share)
        cut = choose_channels(self.model, walk, Amount(section, share, budget), decided, progress)
        if section.refit and any(opr.moments is not None for opr in oprs.values()):
            self._part("REFIT")
            refit(cut, oprs)
        masks.set_masks(self.model, cut)
        ask_layers(self.calls(), oprs, share, norms=True)

    def reset_masks(self) -> None:
        """Remove all masks."""
        masks.reset_masks(self.model)

    # -- results -------------------------------------------------------------------------------------
    def walk(self) -> Walk:
        """The labels of the plain graph, with the current weights."""
        if self.example is None:
            raise ConfigError(
                "SparseModel: needs an example input first: SparseModel(model, config, example)"
            )
        hidden = self._hidden
        if hidden["walk"] is None and "unshown" in hidden:
            hidden["plain"] = guarded(first_graph(hidden["source"], self.example))
        masks.bake(self.model, hidden["plain"])
        if hidden["walk"] is None:
            with torch.no_grad():
                plain = hidden["plain"].eval()
                heads = self.cfg.sparser.heads
                hidden["walk"] = Walk.through(plain, self.example, heads)
        found: Walk = hidden["walk"]
        return found

    def cut(self) -> Cut:
        """The cut that the masks describe."""
        return masks.cut_by_masks(self.model, self.walk())

    @property
    def plan(self) -> Plan:
        """The kept channels, layer by layer: print it, save it, apply it to a fresh model."""
        return Plan.of(self.cut())

    def compact(self) -> nn.Module:
        """An ordinary module: smaller if TYPE is structured, otherwise with zeros."""
        own = masks.baked(self.model, self._hidden["source"], self._hidden["plain"], self.cfg.sparser.type)
        set_training(own, {inside_of_whole(path): flag for path, flag in training_flags(self.model).items()})
        if all(
            bool(opr.mask_of(name).all()) for opr in self.oprs().values() for name in opr.layer_parameters()
        ):
            log.warning("compact: no mask removes anything; set RATIO and call calc_params() first")
        if self.cfg.sparser.type == "unstructured":
            return own
        return compact_with_plan(own, self.cut())

    def sparsity(self) -> dict[str, float]:
        """The share of masked weights of each layer."""
        found: dict[str, float] = {}
        for path, opr in self.oprs().items():
            for name, p in opr.layer_parameters().items():
                if p.dim() > 1:
                    found[f"{path}.{name}".removesuffix(".weight")] = float(
                        (opr.mask_of(name) == 0).float().mean()
                    )
        return found

    def export_onnx(
        self,
        dummy_data: Any,
        name: str = "model.onnx",
        input_names: list[str] | None = None,
        output_names: list[str] | None = None,
        dynamic_axes: Any = None,
        opset_version: int = 13,
        verbose: bool = False,
        extra_info: bool = False,
        **options: Any,
    ) -> Any:
        """Write the compact model to a file, run the file, and compare; `extra_info` has no effect here."""
        from sparsebit.export.export_module import export_module

        if self.example is None:
            call_of(dummy_data, self).run(self)
        model = self.compact().eval()
        return export_module(
            model,
            dummy_data,
            name,
            input_names,
            output_names,
            dynamic_axes,
            opset_version,
            verbose,
            **options,
        )

    # -- inner parts ---------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        """Labels use nodes as keys, and a copy has other nodes, so the walk is made again when needed."""
        return {**self.__dict__, "_hidden": {**self._hidden, "walk": None}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.model = MaskedGraph.of(self.model)  # pickle makes a plain graph
        sharing.follow(self.model, self._hidden["source"], self._hidden["links"])

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseModel:
        """The copy shares its parameters with a copy of the user's model."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        source = self._hidden["source"]
        memo[id(source)] = copied = own_copy(source)
        links = self._hidden["links"]
        memo.update(sharing.copies(source, copied) if links else {})
        for key, value in self.__getstate__().items():
            new.__dict__[key] = copy.deepcopy(value, memo)
        sharing.follow(new.model, copied, links)
        return new
