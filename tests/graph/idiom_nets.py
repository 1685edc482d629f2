"""Tiny models written the way very many are: the tutorial's transformer, BERT, LLaMA, GPT, Swin, split loops."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


# -- positions from a buffer -----------------------------------------------------------------------------
class PositionalEncoding(nn.Module):
    """As in the tutorial of torch."""

    def __init__(self, width: int, longest: int = 32):
        super().__init__()
        position = torch.arange(longest).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        pe = torch.zeros(1, longest, width)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[:, : x.size(1)]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(20, 16), PositionalEncoding(16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, ids):
        return self.head(self.layer(self.positions(self.embed(ids) * 4.0)))


class BertEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(20, 16), nn.Embedding(32, 16), nn.Embedding(2, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("position_ids", torch.arange(32).expand((1, -1)), persistent=False)
        self.register_buffer("token_type_ids", torch.zeros(1, 32, dtype=torch.long), persistent=False)

    def forward(self, input_ids, past: int = 0):
        batch, length = input_ids.size()
        position_ids = self.position_ids[:, past : length + past]
        if self.token_type_ids is not None:
            kinds = self.token_type_ids[:, :length].expand(batch, length)
        return self.norm(self.words(input_ids) + self.kinds(kinds) + self.places(position_ids))


class Bert(nn.Module):
    """Embeddings, attention behind an extended mask, and a feed-forward."""

    def __init__(self):
        super().__init__()
        self.embeddings = BertEmbeddings()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 3)

    def heads(self, x):
        return x.view(x.size()[:-1] + (4, 4)).permute(0, 2, 1, 3)

    def forward(self, input_ids, attention_mask):
        x = self.embeddings(input_ids)
        mask = attention_mask[:, None, None, :].to(dtype=x.dtype)
        mask = (1.0 - mask) * torch.finfo(x.dtype).min
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        scores = (torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(4) + mask).softmax(-1)
        context = torch.matmul(scores, v).permute(0, 2, 1, 3).contiguous()
        x = x + context.view(context.size()[:-2] + (16,))
        return self.head(x + self.down(F.gelu(self.up(x))))


# -- sizes unpacked from a shape, dtypes ------------------------------------------------------------------
def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Rotary(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, width, 2).float() / width))

    def forward(self, x, position_ids):
        inv_freq = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        freqs = (inv_freq @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4, kv_heads: int = 2):
        super().__init__()
        self.head_dim, self.groups = width // heads, heads // kv_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def repeat_kv(self, x):
        batch, heads, length, width = x.shape
        x = x[:, :, None, :, :].expand(batch, heads, self.groups, length, width)
        return x.reshape(batch, heads * self.groups, length, width)

    def forward(self, x, cos, sin, mask):
        input_shape = x.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        q = self.q_proj(x).view(hidden_shape).transpose(1, 2)
        k = self.k_proj(x).view(hidden_shape).transpose(1, 2)
        v = self.v_proj(x).view(hidden_shape).transpose(1, 2)
        q, k = (t * cos.unsqueeze(1) + rotate_half(t) * sin.unsqueeze(1) for t in (q, k))
        k, v = self.repeat_kv(k), self.repeat_kv(v)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5 + mask
        scores = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        out = torch.matmul(scores, v).transpose(1, 2).contiguous()
        return self.o_proj(out.reshape(*input_shape, -1).contiguous())


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rotary, self.attention = nn.Embedding(20, 16), Rotary(4), LlamaAttention()
        self.gate, self.up, self.down = (nn.Linear(*io, bias=False) for io in ((16, 32), (16, 32), (32, 16)))
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        length = input_ids.shape[1]
        mask = torch.full((length, length), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device)
        mask = torch.triu(mask, diagonal=1)[None, None]
        position_ids = torch.arange(length, device=x.device).unsqueeze(0).expand(x.shape[0], -1)
        cos, sin = self.rotary(x, position_ids)
        x = x + self.attention(x, cos, sin, mask)
        return self.head(x + self.down(F.silu(self.gate(x)) * self.up(x)))


class MaskedFill(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(32, 32, dtype=torch.bool)).view(1, 1, 32, 32))
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def heads(self, x):
        return x.view(*x.shape[:2], 4, -1).transpose(1, 2)

    def forward(self, x):
        q, k, v = map(self.heads, self.c_attn(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)) / (k.size(-1) ** 0.5)
        length = q.size(-2)
        scores = scores.masked_fill(~self.bias[:, :, :length, :length], torch.finfo(scores.dtype).min)
        out = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.c_proj(out.reshape(*out.shape[:-2], -1))


# -- windows ---------------------------------------------------------------------------------------------
def window_partition(x, window):
    B, H, W, C = x.shape
    x = x.view(B, H // window, window, W // window, window, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window, window, C)


def window_reverse(windows, window, H, W):
    B = int(windows.shape[0] / (H * W / window / window))
    x = windows.view(B, H // window, W // window, window, window, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class Swin(nn.Module):
    """One block with shifted windows and relative positions."""

    def __init__(self, width: int = 16, heads: int = 4, window: int = 2):
        super().__init__()
        self.window, self.num_heads, self.scale = window, heads, (width // heads) ** -0.5
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        where = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij"))
        where = where.flatten(1)
        away = where[:, :, None] - where[:, None, :] + window - 1
        self.register_buffer("index", away[0] * (2 * window - 1) + away[1])
        self.norm, self.qkv, self.proj = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.up, self.down, self.head = nn.Linear(width, 32), nn.Linear(32, width), nn.Linear(width, 5)

    def attention(self, x):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        n = self.window**2
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        scores = ((q * self.scale) @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1)
        return self.proj((scores @ v).transpose(1, 2).reshape(B_, N, C))

    def forward(self, x):
        x = self.patches(x).permute(0, 2, 3, 1)
        _, H, W, C = x.shape
        windows = window_partition(torch.roll(self.norm(x), (-1, -1), (1, 2)), self.window)
        windows = self.attention(windows.view(-1, self.window**2, C))
        back = window_reverse(windows.view(-1, self.window, self.window, C), self.window, H, W)
        x = x + torch.roll(back, (1, 1), (1, 2))
        return self.head((x + self.down(F.gelu(self.up(x)))).mean((1, 2)))


# -- loops over parts, constants made in the forward -------------------------------------------------------
class Splits(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.take = take
        self.stem, self.head = nn.Conv2d(3, 15, 3, padding=1), nn.Conv2d(15, 8, 1)
        self.convs = nn.ModuleList(nn.Conv2d(5, 5, 3, padding=1) for _ in range(3))

    def forward(self, x):
        return self.head(
            torch.cat([conv(t) for conv, t in zip(self.convs, self.take(self.stem(x)))], 1).relu()
        )


def split_in_a_comprehension(x):
    return (t for t in torch.split(x, 5, 1))


def split_method(x):
    return list(x.split(5, dim=1))


def chunk_in_a_comprehension(x):
    return [t.relu() for t in x.chunk(3, 1)]


def map_over_chunk(x):
    return map(torch.relu, x.chunk(3, 1))


class ExpandsConstant(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 16), nn.Linear(16, 5)
        self.register_buffer("scale", torch.linspace(1, 2, 8))

    def forward(self, x):
        ramp = torch.linspace(0, 1, 8).expand(x.shape[0], 8) * self.scale.repeat(x.shape[0], 1)
        y = torch.cat([x, ramp[:, :4]], 1) + self.scale.new_ones(x.shape[0], 12)
        return self.fc2(F.relu(self.fc1(y)))


def words(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randint(0, 20, (batch, length), generator=torch.Generator().manual_seed(batch * 7 + length))


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def masked(batch: int = 2, length: int = 6) -> tuple[Tensor, Tensor]:
    return words(batch, length), (torch.arange(length) < torch.arange(length - batch, length)[:, None]).long()


def picture(batch: int = 2, size: int = 8) -> Tensor:
    return floats(batch, 3, size, size)


MODELS = {  # the model, data of any batch size, another length or size (None: it takes only one)
    "PositionalEncoding": (Encoder, words, 9),
    "BERT": (Bert, masked, 9),
    "LLaMA": (Llama, words, 9),
    "GPT": (MaskedFill, lambda batch=2, length=6: floats(batch, length, 16), 9),
    "Swin": (Swin, picture, 12),
    "split in a comprehension": (lambda: Splits(split_in_a_comprehension), picture, 12),
    "split method": (lambda: Splits(split_method), picture, 12),
    "chunk in a comprehension": (lambda: Splits(chunk_in_a_comprehension), picture, 12),
    "map over chunk": (lambda: Splits(map_over_chunk), picture, 12),
    "constant": (ExpandsConstant, lambda batch=2: floats(batch, 8), None),
}
