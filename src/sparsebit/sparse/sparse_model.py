"""SparseModel: a model with masks. Choose what goes, train on, then `compact()` removes it for real.

    smodel = SparseModel(model, config, example)
    smodel.calibrate(batches, loss)      # where the sparser wants data
    smodel.calc_params()                 # masks
    small = smodel.compact()             # an ordinary, smaller module

The graph of the model exists twice and shares its parameters: `model`, which runs, with masked layers; and a plain
one, which labels are found on and which is cut. Masks are the only record of what goes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.graph.feeding import to_device
from sparsebit.graph.ops import ADDS, op_of
from sparsebit.graph.trace import own_copy, unwrapped
from sparsebit.graph.training import evaluating, set_training, training_flags
from sparsebit.sparse import allocate, feeding, fitting
from sparsebit.sparse.batches import Batches
from sparsebit.sparse.channels import Walk
from sparsebit.sparse.compacting import compact
from sparsebit.sparse.masking import bake, mask_at, oprs_of, reset_masks, set_masks, with_masks
from sparsebit.sparse.plan import Plan
from sparsebit.sparse.prune import call_of, traced
from sparsebit.sparse.refit import reestimate, refit
from sparsebit.sparse.scores import check_judged, class_ratios, class_scores
from sparsebit.sparse.single_weights import mask_single_weights
from sparsebit.sparse.sparse_config import SparseConfig, unmatched
from sparsebit.sparse.surgery import Cut
from sparsebit.utils.device import usable_device

log = logging.getLogger("sparsebit")


class SparseModel(nn.Module):
    """`example` is a tensor, a tuple of arguments or a mapping; without one, the first forward shows the shapes."""

    model: fx.GraphModule

    def __init__(self, model: nn.Module, config: Any = None, example: Any = None):
        super().__init__()
        self.cfg = SparseConfig.load({} if config is None else config)
        self.device = usable_device(self.cfg.device)
        self.example = None if example is None else call_of(example)
        model = unwrapped(model)
        self._hidden: dict[str, Any] = {"source": model, "plain": traced(model, self.example), "walk": None}
        self._waiting: dict[str, Any] | None = None  # a calc_params() that has to see an input first
        self._shown = False
        self.model = with_masks(self._hidden["plain"], self.cfg)
        missed = unmatched(
            self.cfg.sparser, [n for node in self.model.graph.nodes for n in (node.name, str(node.target))]
        )
        if missed:
            log.warning("SPARSER.SPECIFIC: no layer is called %s", " or ".join(missed))
        self.training = model.training
        self.to(self.device)

    # -- the layers ----------------------------------------------------------------------------------
    def oprs(self) -> dict[str, Any]:
        """The masked layers, by module path."""
        return oprs_of(self.model)

    def set_ratio(self, ratio: float) -> None:
        """The same share for every layer; single ones: `smodel.model.conv1.sparser.set_ratio(0.3)`."""
        for opr in self.oprs().values():
            opr.sparser.set_ratio(ratio)

    def disable_sparse_before_add(self) -> None:
        """Layers whose output is added to something keep all of it."""
        oprs = self.oprs()
        for node in self.model.graph.nodes:
            if node.op.startswith("call") and op_of(node, self.model) in ADDS:
                for source in node.all_input_nodes:
                    while source.op == "call_module" and isinstance(oprs.get(str(source.target)), _NormBase):
                        source = source.all_input_nodes[0]
                    if source.op == "call_module" and str(source.target) in oprs:
                        oprs[str(source.target)].sparser.set_ratio(0.0)

    # -- data ----------------------------------------------------------------------------------------
    def prepare_calibration(self) -> None:
        """Kept for old scripts: calibrate() does all there is to do."""

    def calibrate(self, batches: Any, loss: Any = None, progress: bool | None = None) -> SparseModel:
        """Show batches to the sparsers that want some; see feeding.py for what `loss(output, target)` gets."""
        feeding.show(self, self.oprs(), batches, loss, progress)
        self._shown = True
        return self

    def tune_batchnorm(self, batches: Any, progress: bool | None = None) -> SparseModel:
        """Re-estimate the statistics of batch norms for the masked model; needs no labels."""
        calls = Batches(self, batches, progress, "pruning", once=True)
        with calls.named():
            reestimate(self, calls)
        return self

    def refit(self, batches: Any, whole: Any = None, progress: bool | None = None) -> SparseModel:
        """Layers that read less than before come as close to `whole`, the model as it was given, as they can.

        Needs no labels; after calc_params(). What it does: fitting.py.
        """
        if self.cfg.sparser.type == "unstructured":
            raise ConfigError("refit: is for channels that go; TYPE is unstructured")
        if self.example is None:
            raise ConfigError("refit: needs an example input first: SparseModel(model, config, example)")
        source: nn.Module = self._hidden["source"] if whole is None else whole
        device = next((p.device for p in source.parameters()), self.device)
        whole = traced(source, to_device(self.example, device)).to(self.device).eval()
        calls = Batches(self.model, batches, False, "refit")
        with evaluating(self), calls.named():
            fitting.fit(self.model, whole, calls, progress)
        return self

    def penalty(self) -> Tensor:
        """What sparsers that learn (slimming, l0) add to the training loss."""
        terms = [opr.sparser.penalty(opr) for opr in self.oprs().values()]
        found = [term for term in terms if term is not None]
        return torch.stack(found).sum() if found else torch.zeros((), device=self.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.example is None:
            self.example = _alone((args, kwargs))
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self.calc_params(**waiting)
        return self.model(*args, **kwargs)

    # -- what goes -----------------------------------------------------------------------------------
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
        """Set the masks: every layer loses its sparser's ratio, or all what a budget asks for.

        share    of the ratios; a schedule raises it from 0 to 1.
        macs, params, latency   what is left of the whole model, as a share.
        progress show a bar while a budget is searched for; None: only on a terminal.
        Structured pruning must see shapes: with no example so far, the masks come with the next forward.
        """
        wants = next((o.sparser.NEEDS for o in self.oprs().values() if o.sparser.NEEDS), "")
        if wants and not self._shown:
            with_loss = ", loss" if wants == "gradients" else ""
            raise CalibrationError(
                f"{self.cfg.sparser.strategy} decides by data: call calibrate(batches{with_loss}) before "
                f"calc_params(), or pass batches to sparsebit.prune"
            )
        if example is not None:
            self.example = call_of(example)
        budget = {
            k: v for k, v in (("macs", macs), ("params", params), ("latency", latency)) if v is not None
        }
        if budget and share != 1.0:
            raise ConfigError(
                f"share: is of the ratios, and {next(iter(budget))} says how much goes; leave out one"
            )
        if self.cfg.sparser.type == "unstructured":
            if budget:
                raise ConfigError(f"{next(iter(budget))}: a budget needs TYPE: structured; say RATIO")
            self.reset_masks()
            mask_single_weights(self.oprs(), share)
        elif self.example is None:
            self._waiting = {"share": share, **budget}
        else:
            self._mask_channels(share, budget, progress)

    def _mask_channels(self, share: float, budget: Mapping[str, float], progress: bool | None) -> None:
        walk, section = self.walk(), self.cfg.sparser
        scores = class_scores(walk, self.oprs())
        ratios = class_ratios(walk, self.oprs(), section.ratio)
        if budget and not bool((ratios > 0).any()):
            raise ConfigError(
                "RATIO: is 0 for every layer, so that all stay whole; a budget needs one above 0"
            )
        check_judged(walk, self.oprs(), scores, ratios)
        known = scores.isfinite() & (ratios > 0)
        spread = allocate.together if section.scope == "global" else allocate.uniform

        def choose(ratio: float) -> Tensor:
            shares = torch.where(known, ratio if budget else ratios * ratio, 0.0).clamp(max=allocate.MOST)
            return spread(walk, scores, shares, section.round_to)

        if budget:
            ((name, left),) = budget.items()
            dropped = allocate.within(walk, choose, name, left, section.round_to, progress)
        else:
            dropped = choose(share)
        if section.round_to > 1 and share == 1 and bool(known.any()) and not len(dropped):
            log.warning("round_to %d: no layer has so many channels that some could go", section.round_to)
        cut = Cut(walk, dropped)
        if section.refit:
            refit(cut, self.oprs())
        set_masks(self.model, cut)

    def reset_masks(self) -> None:
        """Nothing goes."""
        reset_masks(self.model)

    # -- results -------------------------------------------------------------------------------------
    def walk(self) -> Walk:
        """The labelled plain graph, with the weights of now."""
        if self.example is None:
            raise ConfigError(
                "SparseModel: needs an example input first: SparseModel(model, config, example)"
            )
        bake(self.model, self._hidden["plain"])
        if self._hidden["walk"] is None:
            with torch.no_grad():
                plain, heads = self._hidden["plain"].eval(), self.cfg.sparser.heads
                self._hidden["walk"] = Walk.through(plain, self.example, heads)
        found: Walk = self._hidden["walk"]
        return found

    def cut(self) -> Cut:
        """What the masks say: a class goes where every parameter that has it is masked there."""
        walk = self.walk()
        n, oprs = len(walk.labels), self.oprs()
        gone, stays = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
        for part in walk.slices.values():
            mask = mask_at(self.model, part.path, oprs)
            if mask is not None:
                left = mask.cpu().movedim(part.axis, 0).flatten(1).any(1) if mask.dim() > 1 else mask.cpu()
                roots = walk.labels.roots(part.labels)
                gone[roots[~left]] = True
                stays[roots[left]] = True
        return Cut(walk, (gone & ~stays).nonzero().flatten())

    @property
    def plan(self) -> Plan:
        """Which channels stay, layer by layer: print it, save it, apply it to a fresh model."""
        return Plan.of(self.cut())

    def compact(self) -> nn.Module:
        """An ordinary module without what the masks say: smaller if structured, else with zeros."""
        own = own_copy(self._hidden["source"])
        if bake(self.model, own):  # its code holds weights where the graph has layers
            own = copy.deepcopy(self._hidden["plain"])
            bake(self.model, own)
        set_training(own, training_flags(self.model))
        if all(
            bool(opr.mask_of(name).all()) for opr in self.oprs().values() for name in opr.layer_parameters()
        ):
            log.warning("compact: no mask removes anything; set RATIO and call calc_params() first")
        if self.cfg.sparser.type == "unstructured":
            return own
        return compact(own, self.cut())

    def sparsity(self) -> dict[str, float]:
        """The share of weights that is masked, by layer."""
        return {
            f"{path}.{name}".removesuffix(".weight"): float((~opr.mask_of(name)).float().mean())
            for path, opr in self.oprs().items()
            for name, p in opr.layer_parameters().items()
            if p.dim() > 1
        }

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
        """Write the compact model, run the file, and compare; `extra_info` has no meaning here."""
        from sparsebit.export.plain import export_module

        if self.example is None:
            self(*call_of(dummy_data)[0], **call_of(dummy_data)[1])
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
        """Labels are keyed by nodes, and nodes of a copy are others: found again when they are needed."""
        return {**self.__dict__, "_hidden": {**self._hidden, "walk": None}}

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseModel:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo[id(self._hidden["source"])] = own_copy(self._hidden["source"])
        for key, value in self.__getstate__().items():
            new.__dict__[key] = copy.deepcopy(value, memo)
        return new


def _alone(call: Any) -> Any:
    args, kwargs = call
    detach = lambda v: v.detach().clone() if isinstance(v, Tensor) else v
    return tuple(map(detach, args)), {k: detach(v) for k, v in kwargs.items()}
