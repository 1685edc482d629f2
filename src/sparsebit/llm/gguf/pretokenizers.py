"""How a byte-level BPE tokenizer cuts text before it merges: llama.cpp knows the ways by name (`tokenizer.ggml.pre`).

The names and the regular expressions that belong to them are facts of llama.cpp. A tokenizer gets the name whose cuts
of a long, nasty text are its own cuts; the spelling of its expressions does not matter.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from sparsebit.errors import ExportError

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d"
SPACES = r"\s+(?!\S)|\s+"
MARKS = r" ?[^\s\p{L}\p{N}]+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NO_LETTER = r"[^\r\n\p{L}\p{N}]?"
LLAMA3 = rf"(?i:{WORDS})|{NO_LETTER}\p{{L}}+|\p{{N}}{{1,3}}|{MARKS}[\r\n]*|\s*[\r\n]+|{SPACES}"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = rf"(?i:{WORDS})|{NO_LETTER}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{SPACES}"
TEKKEN = (
    rf"{NO_LETTER}{UPPER}*{LOWER}+|{NO_LETTER}{UPPER}+{LOWER}*|\p{{N}}|{MARKS}[\r\n/]*|\s*[\r\n]+|{SPACES}"
)
GPT4O = (
    rf"{NO_LETTER}{UPPER}*{LOWER}+(?i:{WORDS})?|{NO_LETTER}{UPPER}+{LOWER}*(?i:{WORDS})?|\p{{N}}{{1,3}}"
    rf"|{MARKS}[\r\n/]*|\s*[\r\n]+|{SPACES}"
)
SEED = rf"(?i:{WORDS})|{NO_LETTER}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{SPACES}"
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    rf"|\s*[\r\n]+|{SPACES}"
)
HAN = "[一-龥぀-ゟ゠-ヿ]+"
HAN_WIDE = "[一-龥ࠀ-一가-퟿]+"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

# name -> its cuts, in order, and whether a word that is a token needs no merges; the first of equal rows is taken
GPT2_CUT = "gpt2"
DIGITS = "digits"
KNOWN: list[tuple[str, tuple[str, ...], bool]] = [
    ("gpt-2", (GPT2_CUT,), False),
    ("smollm", (DIGITS, GPT2_CUT), False),
    ("llama-bpe", (LLAMA3,), True),
    ("dbrx", (LLAMA3,), False),
    ("qwen2", (QWEN2,), False),
    ("qwen35", (QWEN35,), False),
    ("tekken", (TEKKEN,), True),
    ("gpt-4o", (GPT4O,), False),
    ("deepseek-v3", (r"\p{N}{1,3}", HAN, DEEPSEEK3), False),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_WIDE, r"\p{N}"), False),
    ("falcon", ("punctuation", GPT2_CUT, "[0-9][0-9][0-9]"), False),
    ("seed-coder", (SEED,), False),
    ("bloom", (BLOOM,), False),
    ("viking", (BLOOM, r"\p{N}"), False),
]
SIMPLER = ("tekken", "gpt-4o")
MARKS_APART = "llama.cpp cuts at combining marks (as in Hindi), the tokenizer does not"
ATOMS = [
    "don't", "I'LL", "we'Ve", "'re", "a'd", "'", "\"", "x", "Hello", "wORLD", "camelCase", "ÉCOLE", "straße", "naïve",
    "e\u0301", "3", "33", "333", "4444", "1234567", "３", "½", "2.5", "1,000", " ", "  ", "   ", "\n", "\n\n", "\r\n",
    "\t", "\t\t", " \n", "\n ", "\u00a0", "\u3000", ".", "...", "!?", "--", "==", "/", "//", "/\n", "…", "。", "，",
    "(", ")", "[", "]", "{", "`", "```", "~", "$", "+", "<", "^", "|", "_", "@", "#", "%", "&", "*", "中文",
    "我想", "龥", "ひらがな", "カタカナ", "한국어", "Български", "ру́сский", "عربى", "हिन्दी", "ไทย",
    "កាន់", "🚀", "🦙🦙", "😶‍🌫️", "✅", "µ", "Å", "ǅ", "ʰ", "ª",
    "€", "№", "\u200d", "\u0301",
]  # fmt: skip


def name_of(data: dict[str, Any], pre: str | None = None) -> tuple[str, str]:
    """The name for a tokenizer.json of byte-level BPE, and a note on what llama.cpp does otherwise (or nothing)."""
    if pre is not None:
        return pre, f"pre {pre}: was given and is not checked"
    ignore_merges = bool(data["model"].get("ignore_merges"))
    cuts = _cut(_without_prefix(data.get("pre_tokenizer")))
    same = [(name, ignores) for name, way, ignores in KNOWN if _cut(_as_json(way)) == cuts]
    if not same:
        raise ExportError(
            "tokenizer: llama.cpp has no name that we know for the way this tokenizer cuts text "
            f"(pre_tokenizer: {json.dumps(data.get('pre_tokenizer'))[:300]}); look for the model in llama.cpp's "
            "convert_hf_to_gguf.py and pass its name with pre= (--pre), for example pre='gpt-2'"
        )
    exact = [name for name, ignores in same if ignores == ignore_merges]
    if exact:
        return exact[0], f"pre {exact[0]}: {MARKS_APART}" if exact[0] in SIMPLER else ""
    return same[0][0], (
        f"pre {same[0][0]}: cuts text alike, but the tokenizer's ignore_merges is {ignore_merges} and llama.cpp's is "
        f"{not ignore_merges}: words that are whole tokens may be split otherwise"
    )


def probe() -> str:
    """A fixed text in which every kind of character meets every other kind."""
    order = random.Random(1)
    pairs = list(itertools.product(ATOMS, repeat=2))
    order.shuffle(pairs)
    return "".join(a + b for a, b in pairs)


def _cut(data: dict[str, Any] | None) -> list[tuple[int, int]]:
    """The places where the probe is cut, in characters: a ByteLevel step writes each byte as one character."""
    pre = _pre_tokenizer(data)
    if pre is None:
        return []
    return [place for _, place in pre.pre_tokenize_str(probe())]


def _pre_tokenizer(data: dict[str, Any] | None) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    empty = json.loads(Tokenizer(BPE()).to_str())
    empty["pre_tokenizer"] = data
    return Tokenizer.from_str(json.dumps(empty)).pre_tokenizer


def cut_of(way: tuple[str, ...]) -> Any:
    """A pre-tokenizer that cuts by a row of the table."""
    return _pre_tokenizer(_as_json(way))


def _as_json(steps: tuple[str, ...]) -> dict[str, Any]:
    """A row of the table in the form of tokenizer.json."""
    found: list[dict[str, Any]] = []
    for step in steps:
        if step == DIGITS:
            found.append({"type": "Digits", "individual_digits": True})
        elif step == "punctuation":
            found.append({"type": "Punctuation", "behavior": "Contiguous"})
        elif step == GPT2_CUT:
            found.append(_byte_level(True))
        else:
            found.append(
                {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
            )
    if GPT2_CUT not in steps:
        found.append(_byte_level(False))
    return {"type": "Sequence", "pretokenizers": found}


def _byte_level(cuts: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": cuts}


def _without_prefix(data: Any) -> Any:
    """The steps without the space that ByteLevel adds before the text: it would shift every place."""
    if data is None:
        return None
    if data.get("type") == "Sequence":
        return {**data, "pretokenizers": [_without_prefix(step) for step in data["pretokenizers"]]}
    if data.get("type") == "ByteLevel":
        return {**data, "add_prefix_space": False, "trim_offsets": False}
    return data
