"""A model whose residual stream is rotated: h Q instead of h, with the same outputs (QuaRot, SpinQuant, 2024).

Gains of norms move into the layers that read them; then readers get W Q, writers Q^T W, embeddings E Q. That holds for
RMSNorm alone, which only sees the length of h. Every block, and the rest of the model, runs both ways: a different
output is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.graph.run.batches import as_iterable
from sparsebit.graph.run.calls import Call as ForwardCall
from sparsebit.graph.run.calls import to_device
from sparsebit.graph.run.signature import signature_of
from sparsebit.llm.checks.perplexity import logits_of
from sparsebit.llm.models.blocks import linears_of
from sparsebit.llm.models.sources import InMemory
from sparsebit.llm.transforms.smooth import Trial, norm_offset
from sparsebit.llm.walk.capture import Call, Captured, call_of, wrapper
from sparsebit.llm.walk.lane import Lane
from sparsebit.llm.walk.statistics import sharing
from sparsebit.numeric.solvers.rotation import rotation

WAY_OUT = "only decoders with RMSNorm before their layers can be rotated; leave rotate=False"


class Rotated(InMemory):
    """A source of rotated blocks; the outside of the model is rotated at once, in a copy."""

    def __init__(self, inner: InMemory) -> None:
        if len(inner.layout.towers) + len(inner.layout.left) > 1:
            raise ConfigError(f"rotate: the model has more than one tower; {WAY_OUT}")
        self.inner = inner
        self.layout = inner.layout
        self.folder = inner.folder
        self.names = inner.names
        self.extra = inner.extra
        shared: dict[int, Any] = {id(p): p for p in inner.model.parameters()}
        self.model = copy.deepcopy(inner.model, shared)  # its own modules, the same tensors
        self.calls: list[list[Call]] = []
        self.hidden: Tensor | None = None
        self.q = self._rotate_outside()

    def prove(self, captured: Captured, batches: Any) -> None:
        """Compares the layers outside the blocks. Each block is compared when it is made."""
        self.calls = [calls[:1] for calls in captured.calls]
        self.hidden = captured.hidden[0]
        batch = next(iter(as_iterable(batches)))
        first = self.inner.block(0)
        ours, theirs = (_outside(s.model, s.blocks, batch, first) for s in (self, self.inner))
        if not _close(ours, theirs, theirs.dtype):
            raise ConfigError(
                f"rotate: the model returns different logits when its embeddings are rotated; {WAY_OUT}"
            )

    @torch.no_grad()
    def block(self, index: int) -> nn.Module:
        if self.hidden is None:
            raise ConfigError("rotate: needs calibration data, to show that the outputs stay the same")
        block = self.inner.block(index)
        kind = next(iter(linears_of(block).values())).weight.dtype
        exact = torch.promote_types(kind, torch.float32)
        block = block.to(exact)
        call = self.calls[index][0].cast(exact)
        rotated = self.hidden.to(exact)
        plain = self.hidden.to(exact) @ self.q.T.to(exact)
        expected = call.run(block, plain) @ self.q.to(exact)
        rotate_block(block, call, plain, self.q, self.layout.prefix(index)[:-1])
        if not _close(call.run(block, rotated), expected, exact):
            raise ConfigError(
                f"rotate: {self.layout.prefix(index)[:-1]} returns a different output when it is rotated; {WAY_OUT}"
            )
        return block.to(kind)

    def sample(self, index: int) -> nn.Module:
        return self.inner.sample(index)

    def extras(self) -> dict[str, Tensor]:
        return self.inner.extras()

    def first_rows(self) -> Iterator[Tensor]:
        return self.inner.first_rows()

    @torch.no_grad()
    def _rotate_outside(self) -> Tensor:
        inside = self.layout.path + "."
        outside = {n: m for n, m in self.model.named_modules() if not n.startswith(inside)}
        tables = [m for m in outside.values() if isinstance(m, nn.Embedding)]
        width = tables[0].embedding_dim if tables else 0
        heads = [m for m in outside.values() if type(m) is nn.Linear and m.in_features == width]
        norms = {n: m for n, m in outside.items() if is_norm(m, width)}
        if not tables or not heads or len(norms) != 1:
            raise ConfigError(
                f"rotate: found {len(tables)} embeddings, {len(heads)} heads and {len(norms)} norms outside the "
                f"blocks, not one norm between blocks and head; {WAY_OUT}"
            )
        q = rotation(width)
        [(name, norm)] = norms.items()
        gain = take_gain(norm, name)
        for table in tables:
            put(table, "weight", table.weight.double() @ q.to(table.weight.device))
        for head in heads:  # no longer tied to the embedding: its rows carry the gain of the norm
            put(head, "weight", head.weight.double() * gain @ q.to(head.weight.device))
        config = getattr(self.model, "config", None)
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False  # type: ignore[union-attr]
        return q


@torch.no_grad()
def rotate_block(block: nn.Module, call: Call, hidden: Tensor, q: Tensor, name: str) -> None:
    """Changes the block. Its input `hidden` shows which layer reads the stream through which norm."""
    linears = linears_of(block)
    width = len(q)
    groups = sharing(Lane(block, [call], [hidden]), linears)
    trial = Trial(block, groups, call, hidden)
    read: set[str] = set()
    for group in groups:
        x = trial.inputs.get(group[0])
        feeding = [n for n, out in trial.outputs if out is x and is_norm(block.get_submodule(n), width)]
        if feeding:
            gain = take_gain(block.get_submodule(feeding[0]), f"{name}.{feeding[0]}")
            for reader in group:
                put(linears[reader], "weight", linears[reader].weight.double() * gain @ q.to(gain.device))
            read.update(group)
    for writer, linear in linears.items():
        if writer not in read and linear.out_features == width:
            put(linear, "weight", q.T.to(linear.weight.device) @ linear.weight.double())
            if linear.bias is not None:
                put(linear, "bias", linear.bias.double() @ q.to(linear.weight.device))


def is_norm(module: Any, width: int) -> bool:
    return isinstance(getattr(module, "weight", None), Tensor) and module.weight.shape == (width,)


def take_gain(norm: Any, name: str) -> Tensor:
    """The gain of a norm in float64; the norm itself is left without one."""
    if isinstance(norm, nn.LayerNorm) or getattr(norm, "bias", None) is not None:
        raise ConfigError(
            f"rotate: {name} is a {type(norm).__name__}, which takes the mean away or adds a bias; {WAY_OUT}"
        )
    offset = norm_offset(norm)
    gain: Tensor = norm.weight.detach().double() + offset
    put(norm, "weight", torch.ones_like(gain) - offset)
    return gain


def put(module: Any, leaf: str, value: Tensor) -> None:
    """A new parameter, in the dtype of the old one."""
    setattr(module, leaf, nn.Parameter(value.to(getattr(module, leaf).dtype), requires_grad=False))


def _outside(model: nn.Module, blocks: nn.ModuleList, batch: Any, first: nn.Module) -> Tensor:
    """The logits of the model with blocks that return their inputs."""
    signature = signature_of(model)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    args, kwargs = ForwardCall.of(batch, signature)
    if "use_cache" in signature.parameters:
        kwargs = {**kwargs, "use_cache": False}
    wrap: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        call, hidden = call_of(args, kwargs, ["hidden_states"])
        if not wrap:
            wrap.append(wrapper(call.output(first, hidden)))
        return wrap[0](hidden)

    try:
        for block in blocks:
            block.__dict__["forward"] = forward
        with torch.no_grad():
            return logits_of(model(*to_device(args, device), **to_device(kwargs, device)))
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def _close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Up to rounding; a stream that is read without being rotated back is off by all of its size."""
    share = 1e-3 if torch.finfo(dtype).bits >= 32 else 0.05
    return float((a - b).abs().max()) <= share * float(b.abs().max())
