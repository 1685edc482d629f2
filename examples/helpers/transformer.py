"""Transformers of the examples: the layer that all of them share, a small BERT and a small GPT-2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5
        if bias is not None:  # large and negative where nothing may be read
            scores = scores + bias
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), bias)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Bert(nn.Module):
    """A sentence classifier: the first token collects, `attention_mask` hides the padding."""

    def __init__(self, words: int, length: int, classes: int = 2, dim: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(words, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Layer(dim, 4) for _ in range(depth))
        self.norm, self.classifier = nn.LayerNorm(dim), nn.Linear(dim, classes)
        self.register_buffer("places", torch.arange(length)[None], persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.word(input_ids) + self.position(self.places)
        bias = (1.0 - attention_mask[:, None, None, :]) * -1e4
        for layer in self.layers:
            x = layer(x, bias)
        return self.classifier(self.norm(x)[:, 0])


class Gpt(nn.Module):
    """Predicts the next token at every place."""

    def __init__(self, words: int, length: int, dim: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, dim), nn.Embedding(length, dim)
        self.h = nn.ModuleList(Layer(dim, 4) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)
        self.register_buffer("places", torch.arange(length)[None], persistent=False)
        self.register_buffer("future", torch.full((length, length), -1e4).triu(1), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(self.places)
        for layer in self.h:
            x = layer(x, self.future)
        return self.lm_head(self.ln_f(x))
