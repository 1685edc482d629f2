"""A causal LM of transformers cut into stages for torch.distributed.pipelining: every process has some of the blocks.

    stage = cut(model, rank, ranks)     # then PipelineStage(stage, rank, ranks, device), Schedule1F1B(...)

The other blocks lose their weights and return the hidden state unchanged, so that all names stay the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError


class Stage(nn.Module):
    """Token ids enter the first stage, hidden states the others; logits leave the last."""

    def __init__(self, model: Any, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self.first = first
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        given = {"input_ids" if self.first else "inputs_embeds": x, "use_cache": False}
        if self.last:
            logits: Tensor = self.model(**given).logits
            return logits
        hidden: Tensor = self.model.get_decoder()(**given).last_hidden_state
        return hidden


def cut(model: Any, rank: int, ranks: int) -> Stage:
    """The part of `model` that process `rank` of `ranks` runs; adapters may be on it. `model` itself is cut."""
    if hasattr(model, "get_base_model"):  # PEFT's wrapper
        model = model.get_base_model()
    decoder = None
    if hasattr(model, "get_decoder"):
        decoder = model.get_decoder()
    blocks = getattr(decoder, "layers", None)
    if decoder is None or not isinstance(blocks, nn.ModuleList) or not hasattr(decoder, "norm"):
        raise ConfigError(
            f"model: {type(model).__name__} has no decoder with `layers` and a `norm`; it cannot be cut"
        )
    if not 1 <= ranks <= len(blocks):
        raise ConfigError(f"ranks: {len(blocks)} blocks cannot be cut into {ranks} stages")
    start, end = (len(blocks) * r // ranks for r in (rank, rank + 1))
    for i, block in enumerate(blocks):
        if not start <= i < end:
            _empty(block)
    if rank < ranks - 1:
        decoder.norm = nn.Identity()
        model.lm_head = nn.Identity()
    if rank > 0:
        decoder.embed_tokens = nn.Identity()
    _check(decoder, blocks, ranks)
    return Stage(model, rank == 0, rank == ranks - 1)


def _empty(block: nn.Module) -> None:
    """The block keeps its attributes, which decoders look at, and nothing else."""
    block._modules.clear()
    block._parameters.clear()
    block.__dict__["forward"] = lambda hidden_states, *args, **kwargs: hidden_states


@torch.no_grad()
def _check(decoder: Any, blocks: nn.ModuleList, ranks: int) -> None:
    """Nothing but blocks may change the hidden state between two stages: some models scale it, or add positions."""
    if ranks == 1:
        return
    kept = [b.__dict__.get("forward") for b in blocks]
    norm = decoder.norm
    try:
        for block in blocks:
            block.__dict__["forward"] = lambda hidden_states, *args, **kwargs: hidden_states
        decoder.norm = nn.Identity()
        hidden = torch.randn(1, 2, decoder.config.hidden_size, device=_device(decoder))
        same = torch.equal(decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state, hidden)
    finally:
        decoder.norm = norm
        for block, forward in zip(blocks, kept):
            block.__dict__.pop("forward")
            if forward is not None:
                block.__dict__["forward"] = forward
    if not same:
        raise ConfigError(
            f"model: {type(decoder).__name__} does something to hidden states beside its blocks; it cannot be cut"
        )


def _device(module: nn.Module) -> torch.device:
    return next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
