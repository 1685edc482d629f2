"""What a run did to the whole model: perplexity before and after, and how far the predictions moved.

While blocks are walked, the held-back sequences go through float and quantized blocks side by side. When the last
block is done, the head reads both. KL is the mean over tokens of sum p log(p / q): p float, q quantized, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.graph.run.signature import signature_of
from sparsebit.llm.checks.perplexity import logits_of
from sparsebit.llm.methods import METHODS
from sparsebit.llm.walk.capture import replaced, runner
from sparsebit.llm.walk.data import IGNORED, named, places_of, tokens_of
from sparsebit.llm.walk.relay import Ends

ROOM = 2**24  # logits that are made at once
# a model has collapsed if its perplexity is WORSE times that of the float model, or its KL is above APART
WORSE = 2.0
APART = 1.0


@dataclass(frozen=True)
class Quality:
    """The quality of one run. `apart` is True if no layer was fitted on these tokens."""

    tokens: int
    before: float  # perplexity of the float model
    after: float
    kl: float
    apart: bool = True

    @property
    def collapsed(self) -> bool:
        return not (self.after <= WORSE * self.before and self.kl <= APART)

    def rows(self) -> Iterator[tuple[str, str]]:
        """A label and a figure."""
        yield "perplexity, float", f"{self.before:.4g}"
        yield "perplexity, this model", f"{self.after:.4g}"
        yield "KL to the float model", f"{self.kl:.3g} nats"
        yield "measured on", f"{self.tokens} {self.where}"

    @property
    def where(self) -> str:
        if self.apart:
            return "calibration tokens that were held back"
        return "calibration tokens, fitted on as well"

    def facts(self) -> dict[str, Any]:
        """For JSON, which knows no infinity."""
        found: dict[str, Any] = {}
        for k, v in asdict(self).items():
            found[k] = str(v) if isinstance(v, float) and not math.isfinite(v) else v
        return found

    def __str__(self) -> str:
        return f"perplexity {self.before:.4g} -> {self.after:.4g}, KL {self.kl:.3g} nats, on {self.tokens} {self.where}"


def quality_of(facts: Mapping[str, Any]) -> Quality:
    """Read a Quality from its facts."""
    numbers: dict[str, Any] = {}
    for k, v in facts.items():
        numbers[k] = float(v) if isinstance(v, str) else v
    return Quality(**numbers)


def advice(run: Mapping[str, Any]) -> str:
    """The remedies for a collapse; `run` holds the settings of the user."""
    bits = run["bits"]
    method = METHODS.get(run["method"])  # None: a plug-in that is not registered any more
    if method is not None and method.prunes:
        return "prune less (ratio), or by method='sparsegpt'"
    if method is not None and not method.uses_data:
        return "use method='gptq' with calibration data"
    if run["candidate_bits"]:
        return "raise average_bits"
    if bits < 4:
        symmetric = ""
        if run["symmetric"] and bits == 3:
            symmetric = ", or symmetric=False"
        return f"use bits={bits + 1}, or candidate_bits=(2, 3, 4) with average_bits{symmetric}"
    return "use more calibration data, bits=8, or smaller groups (group_size=32)"


@torch.no_grad()
def measure(ends: Ends, apart: bool) -> Quality | None:
    """Measure the quality; None if the model gives no scores of tokens."""
    relay = ends.relay
    model = ends.relay.source.model
    takes = signature_of(model)
    run = runner(model)
    sums = torch.zeros(4, dtype=torch.float64)
    places = torch.tensor(places_of(model))
    for b in range(-relay.held, 0):
        batch = relay.batches[b]
        targets = _targets(named(batch, takes) or {}, model)
        if targets is None:
            continue
        targets = torch.where(torch.isin(targets, places), IGNORED, targets)
        for chosen, more in _pieces(model, targets, takes):
            logits = []
            for which in (1, 0):
                with replaced(ends.players(which, b)):
                    logits.append(logits_of(run(batch, **more)))
            found = _sums(logits[0], logits[1], targets[:, chosen].to(logits[0].device))
            if found is None:
                return None
            sums += found
    count, before, after, kl = sums.tolist()
    if not count:
        return None
    return Quality(int(count), _exp(before / count), _exp(after / count), kl / count, apart)


def _targets(given: Mapping[str, Any], model: Any) -> Tensor | None:
    """(sequences, length): the token that each position should predict, IGNORED where there is none."""
    ids = tokens_of(given)
    labels = given.get("labels")
    both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if both and "decoder_input_ids" not in ids:
        return labels.cpu() if isinstance(labels, Tensor) else None
    if both:
        shown = ids.get("decoder_input_ids")
    else:
        shown = next(iter(ids.values()), None)
    if shown is None or shown.dim() != 2 or shown.shape[1] < 2:
        return None
    return F.pad(shown.cpu()[:, 1:], (0, 1), value=IGNORED)


def _pieces(model: Any, targets: Tensor, takes: Any) -> Iterator[tuple[slice, dict[str, Any]]]:
    """Runs of positions whose logits fit into ROOM, where the model can be asked for some of them."""
    rows, length = targets.shape
    config: Any = getattr(model, "config", None)
    size = 0
    if hasattr(config, "get_text_config"):
        size = getattr(config.get_text_config(), "vocab_size", 0)
    if "logits_to_keep" not in takes.parameters or not size:
        yield slice(0, length), {}
        return
    step = max(ROOM // (rows * size), 1)
    for start in range(0, length, step):
        chosen = slice(start, min(start + step, length))
        yield chosen, {"logits_to_keep": torch.arange(length)[chosen]}


def _sums(right: Any, found: Any, targets: Tensor) -> Tensor | None:
    """Tokens, negative log likelihoods of both, and KL, added up; None for what are no scores of these tokens."""
    real = targets != IGNORED
    if not isinstance(right, Tensor) or right.shape[:-1] != targets.shape:
        return None
    if right.shape[-1] <= int(targets.max()):
        return None
    chosen = targets[real]
    p, q = (logits[real].float().log_softmax(-1) for logits in (right, found))
    kl = (p.exp() * (p - q)).sum()
    losses = (-x.gather(1, chosen[:, None]).sum() for x in (p, q))
    return torch.tensor([len(chosen), *(float(x) for x in losses), float(kl)], dtype=torch.float64)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
