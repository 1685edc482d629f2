"""The tokenizer of a model as GGUF stores it, from what the tokenizer does and not from what its class is called.

`llama`   SentencePiece's BPE: a token's score is the rank of the merge that makes it; unknown characters become bytes
`t5`      SentencePiece's unigram: a token's score is its log probability
`gpt2`    byte-level BPE: a list of merges, and the name of the way text is cut (`pretokenizers.py`)
"""

from __future__ import annotations

import base64
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebit.errors import ExportError
from sparsebit.llm.gguf.pretokenizers import name_of

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
SPACE = "▁"
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
BYTES = {f"<0x{i:02X}>" for i in range(256)}


@dataclass
class Vocabulary:
    """The keys `tokenizer.*` of a file; `notes` lists where llama.cpp differs."""

    model: str
    size: int
    keys: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def metadata(self) -> dict[str, Any]:
        return {"tokenizer.ggml.model": self.model, **self.keys}

    def __str__(self) -> str:
        pre = self.keys.get("tokenizer.ggml.pre")
        return f"{self.model}{f' ({pre})' if pre else ''}, {self.size} tokens"


def without_tokens(rows: int) -> Vocabulary:
    """A file without a tokenizer: llama.cpp loads it and takes token ids, not text."""
    note = "no tokenizer: llama.cpp takes token ids only; name the tokenizer's folder with tokenizer= (--tokenizer)"
    return Vocabulary("none", rows, {}, [note])


def open_tokenizer(where: Any) -> Any:
    """A tokenizer of transformers, from its folder; a loaded one is returned unchanged."""
    if hasattr(where, "backend_tokenizer"):
        return where
    folder = Path(where)
    folder = folder.parent if folder.is_file() else folder
    if not any((folder / name).is_file() for name in FILES):
        raise ExportError(
            f"{folder}: holds no tokenizer (none of {', '.join(FILES)}); copy the tokenizer's files there, or name "
            "their folder with tokenizer= (--tokenizer)"
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if not (folder / "tokenizer_config.json").is_file() and (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers raises for a broken or unknown tokenizer
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ExportError(f"{folder}: transformers cannot load its tokenizer: {text}") from None
    if not hasattr(found, "backend_tokenizer"):
        raise ExportError(
            f"{folder}: {type(found).__name__} has no tokenizer.json; save one with a fast tokenizer of transformers"
        )
    return found


def read_vocabulary(tokenizer: Any, rows: int, pre: str | None = None) -> Vocabulary:
    """The vocabulary for a model with `rows` embeddings."""
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    model = data["model"]
    steps = _flat(data.get("pre_tokenizer"), "pretokenizers")
    cleaners = _flat(data.get("normalizer"), "normalizers")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ExportError(
            "tokenizer: BPE with a prefix or suffix at word pieces is not known to llama.cpp; tokenizer=False writes "
            "a file without one"
        )
    if model["type"] == "BPE" and any(step["type"] == "ByteLevel" for step in steps):
        found = _byte_level(data, steps, cleaners, rows, pre)
    elif model["type"] == "BPE" and model.get("byte_fallback"):
        found = _sentencepiece(tokenizer, data, steps, cleaners, rows)
    elif model["type"] == "Unigram":
        found = _unigram(tokenizer, data, steps, cleaners, rows)
    else:
        kind = "BPE without bytes"
        if model["type"] != "BPE":
            kind = model["type"]
        raise ExportError(
            f"tokenizer: llama.cpp has no decoder's tokenizer of the kind {kind}; there are byte-level BPE, "
            "SentencePiece BPE and unigram; tokenizer=False writes a file without one"
        )
    _special_tokens(found, tokenizer, rows)
    return found


# -- the three kinds -------------------------------------------------------------------------------------
def _byte_level(
    data: dict[str, Any], steps: list[Any], cleaners: list[Any], rows: int, pre: str | None
) -> Vocabulary:
    name, note = name_of(data, pre)
    found = Vocabulary("gpt2", rows, notes=[note] if note else [])
    texts, kinds = _tokens(found, data, rows)
    merges = []
    for merge in data["model"]["merges"]:
        merges.append(merge if isinstance(merge, str) else " ".join(merge))
    _add_list(found, texts, kinds)
    found.keys |= {"tokenizer.ggml.pre": name, "tokenizer.ggml.merges": merges}
    if not merges:
        found.keys["tokenizer.ggml.merges"] = [f"{texts[0]} {texts[0]}"]  # an empty list cannot be stored
    if any(step["type"] == "ByteLevel" and step.get("add_prefix_space") for step in steps):
        found.notes.append(
            "tokenizer: adds a space before a text; llama.cpp does not: begin prompts with one"
        )
    _note_cleaners(found, cleaners)
    return found


def _sentencepiece(
    tokenizer: Any, data: dict[str, Any], steps: list[Any], cleaners: list[Any], rows: int
) -> Vocabulary:
    found = Vocabulary("llama", rows)
    texts, kinds = _tokens(found, data, rows, tokenizer.unk_token_id)
    lost = BYTES - set(texts)
    if lost:
        raise ExportError(
            f"tokenizer: {len(lost)} of the 256 byte tokens are missing, such as {min(lost)}; llama.cpp ends when a "
            "text has a character that is not a token"
        )
    _add_list(found, texts, kinds)
    found.keys["tokenizer.ggml.pre"] = "default"
    found.keys["tokenizer.ggml.scores"] = _scores(found, data["model"], texts)
    found.keys["tokenizer.ggml.add_space_prefix"] = _space_prefix(found, steps, cleaners)
    return found


def _unigram(
    tokenizer: Any, data: dict[str, Any], steps: list[Any], cleaners: list[Any], rows: int
) -> Vocabulary:
    found = Vocabulary("t5", rows)
    model = data["model"]
    texts, kinds = _tokens(found, data, rows, model.get("unk_id"))
    _add_list(found, texts, kinds)
    scores = [score for _, score in model["vocab"]]
    lowest = min(scores, default=0.0)
    found.keys |= {
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [*scores, *([lowest - 1.0] * rows)][:rows],
        "tokenizer.ggml.add_space_prefix": _space_prefix(found, steps, cleaners),
        "tokenizer.ggml.remove_extra_whitespaces": any(
            step["type"] == "Replace" and step["pattern"].get("Regex") == " {2,}" for step in cleaners
        ),
    }
    if model.get("byte_fallback"):
        found.notes.append("tokenizer: unknown characters are bytes; llama.cpp's unigram makes them <unk>")
    for step in cleaners:
        if step["type"] == "Precompiled" and step.get("precompiled_charsmap"):
            found.keys["tokenizer.ggml.precompiled_charsmap"] = base64.b64decode(step["precompiled_charsmap"])
    return found


# -- tokens, types, scores -------------------------------------------------------------------------------
def _tokens(
    found: Vocabulary, data: dict[str, Any], rows: int, unknown: int | None = None
) -> tuple[list[str], list[int]]:
    """Text and type of each of `rows` tokens. Texts differ, because llama.cpp ends where two are equal."""
    vocab = data["model"]["vocab"]
    if isinstance(vocab, dict):
        by_id = {i: t for t, i in vocab.items()}
    else:
        by_id = dict(enumerate(t for t, _ in vocab))
    kinds = dict.fromkeys(by_id, NORMAL)
    for i, text in by_id.items():
        if text in BYTES:
            kinds[i] = BYTE
    for token in data.get("added_tokens", []):
        by_id[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    if unknown is not None and unknown in by_id:
        kinds[unknown] = UNKNOWN
    beyond = sorted(i for i in by_id if i >= rows)
    if beyond:
        found.notes.append(
            f"tokenizer: {len(beyond)} of its tokens have no embedding and are left out, such as {by_id[beyond[0]]!r}"
        )
    texts: list[str] = []
    seen: set[str] = set()
    for i in range(rows):
        text = by_id.get(i) or f"[PAD{i}]"
        text = text if text not in seen else f"[SAME{i}]"
        seen.add(text)
        texts.append(text)
    return texts, [kinds.get(i, UNUSED) if by_id.get(i) == texts[i] else UNUSED for i in range(rows)]


def _add_list(found: Vocabulary, texts: list[str], kinds: list[int]) -> None:
    found.keys |= {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds}


def _scores(found: Vocabulary, model: dict[str, Any], texts: list[str]) -> list[float]:
    """Minus the rank of the first merge that makes a token; what no merge makes comes last."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    pairs = []
    for m in model["merges"]:
        pairs.append(tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m))
    for rank, (left, right) in enumerate(pairs):
        first.setdefault(left + right, rank)
        last[left + right] = rank
    _check_order(found, first, last, set(pairs))
    return [-float(first.get(text, len(pairs))) for text in texts]


def _check_order(
    found: Vocabulary, first: dict[str, int], last: dict[str, int], pairs: set[tuple[str, ...]]
) -> None:
    """llama.cpp joins any two pieces whose join is a token. A list of merges may forbid some, and rank them apart."""
    parts = set(first) | {part for pair in pairs for part in pair}
    forbidden = sum(
        text[:i] in parts and text[i:] in parts and (text[:i], text[i:]) not in pairs
        for text in first
        for i in range(1, len(text))
    )
    ends = sorted((first[text], last[text]) for text in first)
    mixed = sum(a[1] > b[0] for a, b in itertools.pairwise(ends))
    if forbidden or mixed:
        found.notes.append(
            f"tokenizer: {forbidden} joins of pieces are no merges of it and {mixed} ranks are mixed, which "
            "llama.cpp's scores cannot say: rare words may be split otherwise"
        )


def _space_prefix(found: Vocabulary, steps: list[Any], cleaners: list[Any]) -> bool:
    """True if a space comes before a text; with a note where the rule of llama.cpp differs (after every special
    token)."""
    prepends = any(step["type"] == "Prepend" and step.get("prepend") == SPACE for step in cleaners)
    for step in steps:
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            prepends = True
            found.notes.append(
                "tokenizer: adds no second space to a text that begins with one; llama.cpp does (as SentencePiece)"
            )
            if step.get("prepend_scheme") == "first":
                found.notes.append(
                    "tokenizer: adds a space at the beginning only; llama.cpp also after every special token"
                )
    known = [s for s in cleaners if s["type"] in ("Prepend", "Replace", "Precompiled", "Strip")]
    _note_cleaners(found, [s for s in cleaners if s not in known])
    return prepends


def _note_cleaners(found: Vocabulary, cleaners: list[Any]) -> None:
    names = ", ".join(step["type"] for step in cleaners)
    if names:
        found.notes.append(f"tokenizer: llama.cpp does not run its normalizer ({names})")


# -- special tokens --------------------------------------------------------------------------------------
def _special_tokens(found: Vocabulary, tokenizer: Any, rows: int) -> None:
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
        "seperator": tokenizer.sep_token_id,  # their spelling
        "mask": tokenizer.mask_token_id,
    }
    ids = {name: i for name, i in ids.items() if i is not None and i < rows}
    found.keys |= {f"tokenizer.ggml.{name}_token_id": int(i) for name, i in ids.items()}
    for name in ("bos", "eos"):
        if name in ids and found.keys["tokenizer.ggml.token_type"][ids[name]] == NORMAL:
            found.keys["tokenizer.ggml.token_type"][ids[name]] = CONTROL
    if "eos" not in ids:
        found.notes.append("tokenizer: names no end token; llama.cpp takes the default of its kind")
    before, after = _around(tokenizer)
    found.keys["tokenizer.ggml.add_bos_token"] = before == [ids.get("bos")]
    found.keys["tokenizer.ggml.add_eos_token"] = after == [ids.get("eos")]
    if before not in ([], [ids.get("bos")]) or after not in ([], [ids.get("eos")]):
        found.notes.append(f"tokenizer: puts {before} before and {after} after a text; llama.cpp cannot")
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        found.keys["tokenizer.chat_template"] = template
    elif isinstance(template, dict):
        _add_templates(found, template)


def _add_templates(found: Vocabulary, templates: dict[str, str]) -> None:
    others = sorted(name for name in templates if name != "default")
    if "default" in templates:
        found.keys["tokenizer.chat_template"] = templates["default"]
    if others:
        found.keys["tokenizer.chat_templates"] = others
    found.keys |= {f"tokenizer.chat_template.{name}": templates[name] for name in others}


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for i in range(len(whole) - len(plain) + 1):
        if whole[i : i + len(plain)] == plain:
            return list(whole[:i]), list(whole[i + len(plain) :])
    return [], []


def _flat(data: Any, inner: str) -> list[Any]:
    """The steps of a (nested) Sequence."""
    if data is None:
        return []
    if data.get("type") == "Sequence":
        found: list[Any] = []
        for part in data[inner]:
            found.extend(_flat(part, inner))
        return found
    return [data]
