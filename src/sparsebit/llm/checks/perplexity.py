"""Perplexity: exp of the mean negative log likelihood of the next token."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import ConfigError


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, length: int = 2048, batch: int = 1) -> float:
    """The perplexity of `tokens`: one text (n,), cut into windows of `length`, or sequences (count, n), which stay
    whole.

    A window starts without context, and its first token is not predicted; a rest shorter than a window counts too.
    """
    if tokens.dim() == 1:
        parts = list(tokens.split(length))
        if len(parts) > 1:
            windows = [torch.stack(parts[:-1]), parts[-1][None]]
        else:
            windows = [parts[0][None]]
    elif tokens.dim() == 2:
        windows = [tokens]
    else:
        raise ConfigError(f"tokens: must be (n,) or (count, n), their shape is {tuple(tokens.shape)}")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    training = model.training
    model.eval()
    total = 0.0
    count = 0
    try:
        for rows in (part for window in windows for part in window.split(batch)):
            if rows.shape[1] < 2:
                continue
            rows = rows.to(device)
            logits = logits_of(model(rows))[:, :-1].float()
            total += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
            count += rows[:, 1:].numel()
    finally:
        model.train(training)
    if not count:
        raise ConfigError("tokens: perplexity needs at least two tokens in a sequence")
    return math.exp(total / count)


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: a tensor, a tuple that starts with it, or transformers' object with `.logits`."""
    if isinstance(output, Tensor):
        return output
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits
