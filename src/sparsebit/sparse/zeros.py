"""Zeros that last: masks of single weights in a model without masks, such as a QuantModel in training."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Zeros:
    """The handle of keep_zeros(); `remove()` lets the weights change again."""

    def __init__(self, handles: list[Any], masks: dict[str, Tensor]):
        self._handles = handles
        self.masks = masks

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def keep_zeros(model: nn.Module) -> Zeros:
    """Weights that are zero now get no gradient, so an optimizer that starts fresh leaves them at zero.

    small = smodel.compact()                 # 2:4, or any other mask qmodel = QuantModel(small, config) ...
    # calibrate, init_QAT keep_zeros(qmodel)                       # then train
    """
    handles = []
    masks = {}
    for name, p in model.named_parameters():
        if p.dim() > 1 and p.requires_grad and bool((p == 0).any()):
            mask = (p.detach() != 0).to(p.dtype)
            handles.append(p.register_hook(lambda gradient, mask=mask: gradient * mask.to(gradient)))
            masks[name] = mask.bool()
    return Zeros(handles, masks)


def semi_structured(model: nn.Module) -> list[str]:
    """Store 2:4 weights of Linear layers in torch's compressed form, in place; returns their names.

    Sparse tensor cores multiply these up to twice as fast: half or bfloat16 on CUDA, sizes in multiples of
    64.
    """
    from torch.sparse import to_sparse_semi_structured

    from sparsebit.errors import SparsebitError

    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or not isinstance(weight, Tensor) or weight.shape[1] % 4:
            continue
        if int((weight.detach().view(len(weight), -1, 4) != 0).sum(-1).max()) > 2:
            continue
        if weight.device.type != "cuda":
            raise SparsebitError(
                f"{name}: 2:4 weights run compressed on CUDA devices with sparse tensor cores, not on {weight.device}; "
                f"move the model there first, or keep the zeros in dense form"
            )
        module.weight = nn.Parameter(to_sparse_semi_structured(weight.detach()), requires_grad=False)
        found.append(name)
    return found
