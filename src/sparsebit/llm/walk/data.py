"""Calibration data before any work: unusable data is refused, padding is cut away, a part is held back.

The part that is held back is never fitted on; when all blocks are done, the whole model is measured on it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.graph.run.batches import as_iterable
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.signature import signature_of

log = logging.getLogger("sparsebit")
ONE_IN = 16  # sequences are held back: one of so many,
MOST = 16  # at most so many,
FEWEST = 8  # and none where there are fewer; then the model is measured on the tokens that it was fitted on
LEAST_TOKENS = 16
PER_INPUTS = 8  # a layer wants at least one token for so many of its inputs
PADDING = (
    4  # equal padding tokens at an end are taken for padding where there is no mask, if there are so many
)
IDS = ("input_ids", "decoder_input_ids")
MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
IGNORED = -100  # labels that do not count
# no words: filled by a tower
PLACES = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")


@dataclass(frozen=True)
class Data:
    """Batches to fit on, and batches to measure on."""

    fitted: list[Any]
    held: list[Any]
    apart: bool  # nothing of `held` is in `fitted`
    tokens: int | None = field(default=None)  # of `fitted`; None where the model takes no tokens


def prepare(model: nn.Module, batches: Any, widest: int, reads: bool = True) -> Data:
    """Checks and divides the calibration data.

    widest  the most inputs that a layer has.
    reads   the method looks at data; for others everything may be measured on.
    """
    takes = signature_of(model)
    clean: list[Any] = []
    for i, batch in enumerate(as_iterable(batches)):
        _check(model, batch, takes, f"batches: batch {i}")
        clean += without_padding(model, batch, takes, f"batches: batch {i}")
    if not clean:
        raise CalibrationError(
            "no calibration data: `batches` is empty, or all of it is padding; 32 sequences are a good start"
        )
    tokens = _count(clean, takes)
    least = max(LEAST_TOKENS, widest // PER_INPUTS)
    if reads and tokens is not None and tokens < least:
        raise CalibrationError(
            f"batches: {tokens} tokens are too few for layers of {widest} inputs, which would fit these tokens and no "
            f"others; give {least} or more, a few thousand are a good start"
        )
    return divide(clean, takes, reads, tokens)


def divide(batches: list[Any], takes: inspect.Signature, reads: bool, tokens: int | None) -> Data:
    """The last sequences are held back; if the sequences of batches cannot be separated, the last batches."""
    rows = [rows_of(batch, takes) for batch in batches]
    whole = None in rows  # a batch is the smallest piece
    sizes = [1 if whole else n or 1 for n in rows]
    wanted = min(max(sum(sizes) // ONE_IN, 1), MOST)
    if not reads:
        return Data([], _last(batches, sizes, MOST, takes)[1], True, tokens)
    if sum(sizes) < FEWEST:
        return Data(batches, _last(batches, sizes, MOST, takes)[1], False, tokens)
    fitted, held = _last(batches, sizes, wanted, takes)
    return Data(fitted, held, True, tokens)


def _last(
    batches: list[Any], sizes: list[int], wanted: int, takes: inspect.Signature
) -> tuple[list[Any], list[Any]]:
    """Without and with the last pieces, `wanted` of them or all."""
    fitted = list(batches)
    held = list[Any]()
    for size in reversed(sizes):
        if not wanted:
            break
        batch = fitted.pop()
        if size > wanted:
            fitted.append(_cut(batch, takes, slice(0, size - wanted)))
            batch = _cut(batch, takes, slice(size - wanted, size))
        held.insert(0, batch)
        wanted -= min(size, wanted)
    return fitted, held


# -- what a batch is made of ---------------------------------------------------------------------------------
def named(batch: Any, takes: inspect.Signature) -> dict[str, Any] | None:
    """The arguments of a batch by their names; None where a forward takes them as they come."""
    args, kwargs = Call.of(batch, takes)
    try:
        bound = takes.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return None
    found: dict[str, Any] = {}
    for name, value in bound.items():
        kind = takes.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            return None
        found.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return found


def rows_of(batch: Any, takes: inspect.Signature) -> int | None:
    """The number of sequences of a batch of tokens; None for other inputs, which cannot be cut by rows."""
    if not isinstance(batch, Tensor):
        given = named(batch, takes)
    else:
        given = {"": batch}
    tensors = {n: t for n, t in (given or {}).items() if isinstance(t, Tensor)}
    text = all(t.dim() == 2 and (not t.is_floating_point() or n.endswith("mask")) for n, t in tensors.items())
    others = []
    for v in (given or {}).values():
        if isinstance(v, (Mapping, Sequence)) and not isinstance(v, str):
            others.append(v)
    counts = {len(t) for t in tensors.values()}
    if text and not others and len(counts) == 1:
        return counts.pop()
    return None


def _cut(batch: Any, takes: inspect.Signature, rows: Any) -> Any:
    """Some sequences of a batch that has rows."""
    if isinstance(batch, Tensor):
        return batch[rows]
    given = named(batch, takes) or {}
    found = {}
    for n, v in given.items():
        found[n] = v[rows] if isinstance(v, Tensor) else v
    return found


def tokens_of(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of token ids; of a model that has other names, the first argument, where it holds whole numbers."""
    found = {n: given[n] for n in IDS if isinstance(given.get(n), Tensor)}
    first = next(iter(given.values()), None)
    if not found and isinstance(first, Tensor) and first.dim() == 2 and not first.is_floating_point():
        found = {next(iter(given)): first}
    return found


def _count(batches: list[Any], takes: inspect.Signature) -> int | None:
    """Tokens of all batches, of the side of an encoder-decoder that has more."""
    totals: dict[str, int] = {}
    for batch in batches:
        for name, ids in tokens_of(named(batch, takes) or {}).items():
            totals[name] = totals.get(name, 0) + ids.numel()
    return max(totals.values(), default=None)


# -- unusable data ----------------------------------------------------------------------------------------
def _check(model: Any, batch: Any, takes: inspect.Signature, where: str) -> None:
    given = named(batch, takes) or {}
    known = [n for n, p in takes.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    # `**kwargs` would take any name, and no layer would read it
    if given and known and not set(given) & set(known):
        raise CalibrationError(
            f"{where} holds {', '.join(given)}, but the model's forward takes {', '.join(known[:4])}, ...: "
            "use its names"
        )
    if isinstance(batch, Mapping) and not batch:
        raise CalibrationError(f"{where} is empty")
    for name, ids in tokens_of(given).items():
        _check_shapes(model, given, name, where)
        if not ids.numel():
            raise CalibrationError(f"{where} has no tokens")
        size = vocabulary_of(model)
        words = ids[~torch.isin(ids, torch.tensor(places_of(model), dtype=ids.dtype, device=ids.device))]
        if size is not None:
            wrong = words[(words < 0) | (words >= size)]
        else:
            wrong = words[:0]
        if len(wrong):
            raise CalibrationError(
                f"{where} has the token {int(wrong[0])}, but the model knows 0 to {(size or 1) - 1}: "
                "was it made with another tokenizer?"
            )
        most = positions_of(getattr(model, "config", None), name)
        if most is not None and ids.shape[-1] > most:
            raise CalibrationError(
                f"{where} has sequences of {ids.shape[-1]} tokens, but the model was made for {most}; cut them "
                f"(--length {most})"
            )


def _check_shapes(model: Any, given: Mapping[str, Any], name: str, where: str) -> None:
    ids, mask = given[name], given.get(MASKS.get(name, ""))
    if ids.dtype not in (torch.int64, torch.int32) or (hasattr(model, "config") and ids.dim() != 2):
        kind = str(ids.dtype).removeprefix("torch.")
        raise CalibrationError(
            f"{where}: {name} is {kind} of shape {_shape(ids)}; tokens are int64, (sequences, length)"
        )
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape != ids.shape:
        raise CalibrationError(
            f"{where}: {MASKS[name]} is {_shape(mask)}, but {name} is {_shape(ids)}; a mask has one value per token"
        )


def _shape(x: Tensor) -> str:
    return "x".join(map(str, x.shape)) or "()"


def vocabulary_of(model: Any) -> int | None:
    """The size of the vocabulary; for a module of the user, the rows of its longest embedding."""
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if hasattr(model, "get_input_embeddings") and not getattr(model.config, "is_encoder_decoder", False):
        with contextlib.suppress(NotImplementedError):  # a class without a single place for them
            sizes = [getattr(model.get_input_embeddings(), "num_embeddings", 0)]
    return max(sizes, default=0) or None


def places_of(model: Any) -> list[int]:
    """Tokens that stand for parts of an image or a sound."""
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in PLACES)
    return [token for token in found if isinstance(token, int)]


def positions_of(config: Any, name: str = "input_ids") -> int | None:
    """The longest sequence that a model of transformers was made for; None where it does not say."""
    if not hasattr(config, "get_text_config"):
        return None
    text = config.get_text_config()
    keys = ["max_position_embeddings", "n_positions", "max_seq_len"]
    if config.is_encoder_decoder:
        keys.insert(0, "max_target_positions" if name.startswith("decoder") else "max_source_positions")
    found = (getattr(text, key, None) for key in keys)
    return next((n for n in found if isinstance(n, int) and n > 0), None)


# -- padding -------------------------------------------------------------------------------------------------
def without_padding(model: Any, batch: Any, takes: inspect.Signature, where: str) -> Iterator[Any]:
    """The batch, or its sequences without padding, those of one length together."""
    given = named(batch, takes)
    masks = {} if given is None else dict(_masks(model, given))
    if given is None or all(bool(mask.all()) for mask in masks.values()):
        yield batch
        return
    rows = rows_of(batch, takes)
    if rows is None:
        raise CalibrationError(
            f"{where} has padded positions beside inputs that are no tokens; make batches of one sample each, "
            "so that nothing is padded"
        )
    spans: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for row in range(rows):
        both = tuple(_ends(mask[row], f"{where}, sequence {row}") for mask in masks.values())
        if all(start < stop for start, stop in both):  # others have nothing but padding
            spans.setdefault(both, []).append(row)
    for ends, chosen in spans.items():
        part = _cut(given, takes, chosen)
        for side, (start, stop) in zip(masks, ends):
            length = masks[side].shape[1]
            for name, value in part.items():
                if isinstance(value, Tensor) and _side(model, name) == side and value.shape[1] == length:
                    part[name] = value[:, start:stop].contiguous()  # losses look at labels by `view`
        yield part


def _side(model: Any, name: str) -> str:
    """Which of the two sequences of an encoder-decoder a tensor belongs to."""
    both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if both and (name.startswith("decoder") or name == "labels"):
        return "decoder"
    return "encoder"


def _masks(model: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """True where a position is real: by the masks that were given, else by runs of padding tokens at the ends."""
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    ids = tokens_of(given)
    for side, name in (("encoder", "attention_mask"), ("decoder", "decoder_attention_mask")):
        mask = given.get(name)
        labels = given.get("labels")
        own = [t for n, t in ids.items() if _side(model, n) == side]
        if isinstance(mask, Tensor) and mask.dim() == 2 and (not own or mask.shape == own[0].shape):
            yield side, mask != 0
        elif side == "decoder" and isinstance(labels, Tensor) and _side(model, "labels") == side:
            yield side, labels != IGNORED
        elif own and isinstance(pad, int) and own[0].dim() == 2:
            found = _runs(own[0] == pad)
            if bool(found.any()):
                log.warning(
                    "batches: %d tokens %d at the ends of sequences are taken for padding; a mask would say what is",
                    int(found.sum()),
                    pad,
                )
            yield side, ~found


def _runs(pads: Tensor) -> Tensor:
    """The runs of padding tokens at the ends of rows. A few of them may be the end of a text, or the start of an
    answer."""
    found = torch.zeros_like(pads)
    for flip in (False, True):
        run = (pads.flip(1) if flip else pads).long().cumprod(1).bool()
        size = run.sum(1, keepdim=True)
        run = run & (size >= PADDING)
        found |= run.flip(1) if flip else run
    return found


def _ends(real: Tensor, where: str) -> tuple[int, int]:
    places = real.nonzero().flatten().tolist()
    if not places:
        return 0, 0
    start = places[0]
    stop = places[-1] + 1
    if stop - start != len(places):
        raise CalibrationError(
            f"{where} is masked in its middle; only padding at the ends can be left out. Cut the text into sequences"
        )
    return start, stop
