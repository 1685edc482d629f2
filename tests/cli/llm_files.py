"""A tiny Llama with a tokenizer of words, as transformers saves it, and a text."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import torch

WORDS = [
    *("the", "a", "cat", "dog", "house", "tree", "runs", "sleeps", "sees", "likes"),
    *("and", "or", "then", ".", "small", "big", "red", "green"),
]


def tiny_llama(folder: Path, tokens: int = 32) -> Path:
    """`folder` with `model` and `text.txt` in it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
    __import__("zoo_shim").install()  # before transformers looks for torchvision
    transformers = importlib.import_module("transformers")
    tokenizers = importlib.import_module("tokenizers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokens, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text(" ".join(rng.choice(WORDS, 600)))
    return folder
