"""Quantization-aware training: what an ordinary training loop wants of a QuantModel. Most of it are its methods.

qmodel.init_QAT()                                   # calibrated, quantizing, scales learn
optimizer = torch.optim.SGD(qmodel.qat_parameter_groups(0.01, weight_decay=1e-4), 0.01, momentum=0.9)
stages = Stages(qmodel, activations=500, freeze_bn=2000)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.quantization.calibration.batchnorm_folding import fold, override_folded
from sparsebit.quantization.quantizers import Quantizer

if TYPE_CHECKING:
    from sparsebit.quantization.quant_model import QuantModel

__all__ = [
    "FeatureMatch",
    "Stages",
    "distillation_loss",
    "fold_batchnorm",
    "freeze_batchnorm",
    "init_QAT",
    "parameter_groups",
]

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def init_QAT(qmodel: QuantModel) -> None:
    """Calibrated scales and quantization on: the start of quantization-aware training.

    Ends a calibration that is under way; a model that is calibrated or loaded keeps its scales.
    """
    waiting = [name for name, quantizer in qmodel.named_quantizers() if not quantizer.calibrated]
    if qmodel.calibration_runner is not None:
        qmodel.calc_qparams()
    elif waiting:
        raise CalibrationError(
            f"init_QAT() needs scales to start from, but {waiting[0]} has none: call prepare_calibration() and run "
            f"some batches before it, or calibrate(batches), or load a state_dict"
        )
    qmodel.set_quant(w_quant=True, a_quant=True)
    for module in qmodel.modules():
        if isinstance(module, Quantizer) and (module.absorbed or module.unused):
            module.requires_grad_(False)  # DDP waits for every gradient
    qmodel.enable_qat = True


def parameter_groups(
    qmodel: nn.Module, lr: float, scale_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for any torch optimizer: weights with decay; biases and norms without; scales with their own rate.

    Every parameter that learns is there once; frozen ones and those of quantizers that are off for good are not.
    """
    weights: list[Tensor] = []
    others: list[Tensor] = []
    scales: list[Tensor] = []
    seen: set[int] = set()
    for module in qmodel.modules():
        for name, p in module.named_parameters(recurse=False):
            if not p.requires_grad or id(p) in seen:
                continue
            seen.add(id(p))
            if isinstance(module, Quantizer):
                if not module.absorbed and not module.unused:
                    scales.append(p)
            elif isinstance(module, NORMS) or p.dim() < 2 or name.endswith("bias"):
                others.append(p)
            else:
                weights.append(p)
    groups = [
        {"params": weights, "lr": lr, "weight_decay": weight_decay, "name": "weights"},
        {"params": others, "lr": lr, "weight_decay": 0.0, "name": "biases"},
        {"params": scales, "lr": lr if scale_lr is None else scale_lr, "weight_decay": 0.0, "name": "scales"},
    ]
    return [group for group in groups if group["params"]]


def batch_norms(model: nn.Module) -> list[Any]:
    """Batch (and instance) norms that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


def freeze_batchnorm(qmodel: QuantModel, affine: bool = False) -> None:
    """Make batch norms use their running statistics, also in train mode; `affine` freezes their weights too."""
    qmodel.norms_frozen = True
    qmodel.train(qmodel.training)
    if affine:
        for norm in batch_norms(qmodel):
            for p in norm.parameters(recurse=False):
                p.requires_grad_(False)


def fold_batchnorm(qmodel: QuantModel) -> None:
    """Fold the trained batch norms into the layers before them; weights keep the codes that were trained.

    What the network computes in eval mode stays the same. Call it at the end of training, before export.
    """
    for name, quantizer in qmodel.named_quantizers():
        if not quantizer.calibrated:
            raise CalibrationError(
                f"fold_batchnorm(): {name} has no scale yet; it is for the end of training"
            )
    fold(qmodel.model)
    override_folded(qmodel)


class Stages:
    """Switches quantization on, and batch-norm statistics off, during training.

    weights, activations   after how many calls of step() each is quantized; 0: from the start
    freeze_bn              after how many the running statistics are fixed; None: never
    Call step() after every optimizer step, or after every epoch: the unit is yours. Under DDP, scales that no stage
    uses yet have no gradient: wrap with find_unused_parameters=True.
    """

    def __init__(
        self, qmodel: QuantModel, weights: int = 0, activations: int = 0, freeze_bn: int | None = None
    ):
        self.qmodel = qmodel
        self.weights = weights
        self.activations = activations
        self.freeze_bn = freeze_bn
        self.count = 0
        self._switch()

    def step(self) -> None:
        self.count += 1
        if self.count in (self.weights, self.activations, self.freeze_bn):
            self._switch()

    def _switch(self) -> None:
        self.qmodel.set_quant(self.count >= self.weights, self.count >= self.activations)
        if self.freeze_bn is not None and self.count >= self.freeze_bn:
            self.qmodel.freeze_batchnorm()

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was saved; the model must have its weights and scales already."""
        self.count = state["count"]
        self._switch()


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 4.0,
    alpha: float = 0.9,
) -> Tensor:
    """alpha T^2 KL(teacher || student), both softened by T, + (1 - alpha) cross entropy with the labels.

    Hinton et al., Distilling the Knowledge in a Neural Network, 2015. Without labels the teacher alone counts.
    """
    student = student_logits.float() / temperature
    teacher = teacher_logits.detach().float() / temperature
    log_student = student.log_softmax(-1)
    log_teacher = teacher.log_softmax(-1)
    soft = (log_teacher.exp() * (log_teacher - log_student)).sum(-1).mean() * temperature**2
    if labels is None:
        return soft
    return alpha * soft + (1 - alpha) * nn.functional.cross_entropy(student_logits.float(), labels)


class FeatureMatch:
    """How far what some layers read is from what the same layers of the float model read.

    Pulls the quantized network towards the float one from inside, which labels and logits alone do slowly at 2 and 3
    bits. Run both models on a batch, then add `weight * match.loss()` to the training loss.

    layers   module paths, which both models have; None: every convolution and linear layer but the first.
    A config with EQUALIZE rescales channels inside the quantized model: leave it off, as QAT does not need it.
    """

    def __init__(self, qmodel: QuantModel, teacher: nn.Module, layers: list[str] | None = None):
        ours = {}
        for n in qmodel.model.graph.nodes:
            if n.op == "call_module":
                ours[str(n.meta.get("path"))] = str(n.target)
        theirs = dict(teacher.named_modules())
        if layers is None:
            weighted = (nn.Linear, nn.modules.conv._ConvNd)
            layers = [path for path in ours if isinstance(theirs.get(path), weighted)][1:]
        missing = [path for path in layers if path not in ours or path not in theirs]
        if missing or not layers:
            what = "no layer is in both models"
            if missing:
                what = f"{missing[0]!r} is not a layer of both models"
            raise ConfigError(f"FeatureMatch: {what}; both have {sorted(set(ours) & set(theirs))[:5]}, ...")
        self._read: dict[tuple[str, str], Tensor] = {}
        self._handles = []
        for path in layers:
            pair = {"student": qmodel.model.get_submodule(ours[path]), "teacher": theirs[path]}
            for side, module in pair.items():
                hook = functools.partial(self._keep, side, path)
                self._handles.append(module.register_forward_pre_hook(hook))
        self.layers = layers

    def _keep(self, side: str, path: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._read[side, path] = inputs[0] if side == "student" else inputs[0].detach()

    def loss(self) -> Tensor:
        """Mean over the layers of |student - teacher|^2 / |teacher|^2, of the batch that both saw last."""
        if len(self._read) < 2 * len(self.layers):
            raise CalibrationError("FeatureMatch: run a batch through both models before loss()")
        terms = []
        for path in self.layers:
            student = self._read["student", path].float()
            teacher = self._read["teacher", path].float()
            terms.append((student - teacher).square().mean() / teacher.square().mean().clamp_min(1e-12))
        self._read.clear()
        return torch.stack(terms).mean()

    def remove(self) -> None:
        """Take the hooks off both models."""
        for handle in self._handles:
            handle.remove()
