"""Small tokenizers of every kind that GGUF can hold, and texts that tell tokenizers apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXTS = [
    "don't", "I'LL we've 'RE", "1234567 3.14 1,000,000", "你好，世界！我想在apple工作", "🚀🦙🦙 😶‍🌫️ ok", " leading",
    " ", "   three spaces", "\n", "a\n\n\nb", "\r\n\t\ttabs", "Hello <s> and </s> there",
    "<|im_start|>user\nHi<|im_end|>\n",
    "naïve café ÉCOLE straße", "x = {'a': [1, 2]}; // comment", "  \n \t \n  end  ", "한국어 Български हिन्दी ไทย", "",
    "'''```\"\"\"......!!!!??", "camelCaseWord HTTPServer", "the cat and the dog sat on the mat then they ran away",
]  # fmt: skip
CORPUS = [text for text in TEXTS if "<" not in text] * 4 + [
    "the cat sat on the mat and the dog ran away from the house",
    "there is no other way to say that they have been there before, isn't there?",
    "don't they're I'll we've she'd he's I'm 12 345 6789 2024",
]


def byte_level(cut: Any = None, **model: Any) -> Any:
    """Byte-level BPE that cuts as `cut` says (default: as GPT-2), with two special tokens and one user's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE(**model))
    raw.pre_tokenizer = cut or pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_tokens(["<think>"])
    return _fast(raw, eos_token="<|im_end|>", pad_token="<|im_end|>")


def sentencepiece() -> Any:
    """SentencePiece's BPE as transformers converts it: every way to make a token is a merge, ordered by its score."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
    from tokenizers.pre_tokenizers import Metaspace

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(text for text, _ in learned)]
    vocab = {text: i for i, text in enumerate(pieces)}
    known = set(pieces[259:])
    merges = [
        (text[:i], text[i:])
        for text in pieces[259:]
        for i in range(1, len(text))
        if text[:i] in known and text[i:] in known
    ]
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    raw.add_tokens([AddedToken("<think>", normalized=False)])
    return _fast(raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram() -> Any:
    """SentencePiece's unigram."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    raw = Tokenizer(models.Unigram())
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return _fast(raw, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def _fast(raw: Any, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def split_at(*patterns: str) -> Any:
    """A pre-tokenizer that cuts by regular expressions, then writes bytes."""
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)])


def save(tokenizer: Any, model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
