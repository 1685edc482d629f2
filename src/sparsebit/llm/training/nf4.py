"""NF4 by bitsandbytes as a base for adapters, without data: 16 levels, the quantiles of a normal distribution, times
the largest weight of each run of 64 (Dettmers et al., QLoRA, 2023).

    model = get_peft_model(nf4(model), LoraConfig(...))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import SparsebitError
from sparsebit.llm.models.blocks import find_blocks, linears_of


def nf4(model: Any, blocks: str | None = None) -> Any:
    """Turn the Linear layers of all decoder blocks into NF4 layers, in place; no parameter is trained any more.

    blocks  the path of the ModuleList of decoder blocks, where the largest is not it.
    """
    _bitsandbytes()
    model.requires_grad_(False)
    for block in model.get_submodule(find_blocks(model, blocks).path):
        for name, linear in linears_of(block).items():
            parent, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(parent), leaf, nf4_layer(linear.weight, linear.bias))
    return model


def nf4_layer(weight: Tensor, bias: Tensor | None) -> Any:
    """A Linear4bit with this weight, which computes in its dtype."""
    bnb = _bitsandbytes()
    layer = bnb.nn.Linear4bit(
        weight.shape[1],
        weight.shape[0],
        bias=bias is not None,
        compute_dtype=weight.dtype,
        quant_type="nf4",
        device="meta",
    )
    layer.weight = bnb.nn.Params4bit(
        weight.detach().contiguous(), requires_grad=False, quant_type="nf4", module=layer
    )
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    layer.support_avx512bf16_for_cpu = (
        False  # would round the scales to bfloat16 in the first forward, for good
    )
    return layer.to(weight.device)  # this is what quantizes


def is_nf4(layer: Any) -> bool:
    """True for a Linear4bit. The check does not import bitsandbytes, which takes seconds."""
    return type(layer).__name__ == "Linear4bit" and hasattr(layer.weight, "quant_state")


def nf4_weight(layer: Any) -> Tensor:
    """The float32 matrix of a Linear4bit."""
    if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
        layer.state_dict()  # in the layout of its kernel for inference: saving undoes that
    found: Tensor = _bitsandbytes().functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return found.to(torch.float32)


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError:
        raise SparsebitError("nf4: needs bitsandbytes: pip install 'sparsebit[nf4]'") from None
    return bitsandbytes
