"""Small networks as people write them, for pruning: one class per way of handling channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from conv_nets import (
    FPN,
    Bottleneck,
    C2f,
    Dense,
    Flat,
    Ghost,
    Grouped,
    Head,
    Inception,
    Padded,
    PixelShuffleNet,
    Residual,
    Shuffle,
    SpatialGate,
    SqueezeExcite,
    UNet,
    conv,
)
from norm_nets import (
    Length,
    MeanAndDeviation,
    OneMoreThanTheWeight,
    Pictures,
    RootMeanSquare,
    Tokens,
    WithoutWeights,
)
from sequence_nets import (
    Bert,
    EinsumAttention,
    Encoder,
    EncoderDecoder,
    Functional,
    FusedQKV,
    Glu,
    Nested,
    OneHead,
    Recurrent,
    Rotary,
    Seq2Seq,
    TextCNN,
    TorchAttention,
)
from token_nets import ConvNeXt, Llama, Mixer, ViT, Windows
from torch import Tensor, nn


class Shared(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.same, self.head = conv(3, 8), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.relu(self.same(torch.relu(self.same(x)))))


class Norms(nn.Module):
    """PReLU, GroupNorm and InstanceNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.GroupNorm(8, 16),
            nn.PReLU(16),
            nn.Conv2d(16, 12, 3, padding=1),
            nn.InstanceNorm2d(12, affine=True),
            nn.PReLU(),
            nn.Conv2d(12, 8, 1),
            nn.InstanceNorm2d(8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).abs()


class MBConv(nn.Module):
    """EfficientNet's block, twice: expansion, depthwise, squeeze-excite on SiLU, projection, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = conv(3, 8, stride=2), nn.ModuleList([self.block(), self.block()])

    def block(self) -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "up": nn.Sequential(nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.SiLU()),
                "dw": nn.Sequential(
                    nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.BatchNorm2d(24), nn.SiLU()
                ),
                "se": nn.Sequential(
                    nn.AdaptiveAvgPool2d(1), nn.Conv2d(24, 4, 1), nn.SiLU(), nn.Conv2d(4, 24, 1), nn.Sigmoid()
                ),
                "down": nn.Sequential(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8)),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            y = block["dw"](block["up"](x))
            x = x + block["down"](y * block["se"](y))
        return x


class Decoder(nn.Module):
    """Transposed convolutions, plain, grouped and depthwise, from a vector to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.fc = nn.Conv2d(3, 8, 4, 4), nn.Linear(8 * 16, 16 * 4)
        self.up1, self.up2 = nn.ConvTranspose2d(16, 12, 2, 2), nn.ConvTranspose2d(12, 8, 2, 2, groups=4)
        self.up3 = nn.ConvTranspose2d(8, 8, 2, 2, groups=8)
        self.norm, self.out = nn.BatchNorm2d(12), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(torch.flatten(self.enc(x).relu(), 1)).unflatten(1, (16, 2, 2))
        x = F.relu(self.norm(self.up1(x)))
        return torch.sigmoid(self.out(F.relu(self.up3(F.relu(self.up2(x))))))


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.Conv3d(8, 12, (1, 3, 3))
        self.t, self.fc = nn.Conv3d(12, 12, (3, 1, 1), groups=12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(F.relu(self.n(self.a(x))), (1, 2, 2))
        return self.fc(F.adaptive_avg_pool3d(self.t(F.relu(self.b(x))), 1).flatten(1))


class Folds(nn.Module):
    """Patches taken apart and put together again; channels shuffled by torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.shuffle = conv(3, 8), nn.Linear(8 * 9, 6 * 9), nn.ChannelShuffle(2)
        self.c = conv(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shuffle(self.a(x))
        y = self.b(F.unfold(x, 3, padding=1).transpose(1, 2)).transpose(1, 2)
        return self.c(F.fold(y, x.shape[-2:], 3, padding=1))


def video() -> Tensor:
    return torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def masked_words() -> dict[str, Tensor]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": words(), "attention_mask": mask}


def nested() -> tuple[dict[str, Tensor]]:
    return ({"image": image(), "words": words()},)


def image() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def words() -> Tensor:
    return torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(1))


Made = tuple[Callable[[], nn.Module], Callable[[], Any]]
ARCHITECTURES: dict[str, Made] = {
    "plain": (lambda: Head(nn.Sequential(conv(3, 8), conv(8, 12), conv(12, 16)), 16), image),
    "flat": (Flat, image),
    "residual": (
        lambda: Head(nn.Sequential(conv(3, 8), Residual(8, 8), Residual(8, 12, 2), Residual(12, 12)), 12),
        image,
    ),
    "bottleneck": (lambda: Head(nn.Sequential(conv(3, 16), Bottleneck(16), Bottleneck(16)), 16), image),
    "dense": (lambda: Head(Dense(), 20), image),
    "inception": (lambda: Head(Inception(), 18), image),
    "depthwise": (
        lambda: Head(nn.Sequential(conv(3, 8), conv(8, 8, 3, groups=8), conv(8, 16, 1)), 16),
        image,
    ),
    "multiplier": (
        lambda: Head(nn.Sequential(conv(3, 4), conv(4, 8, 3, groups=4), conv(8, 16, 1)), 16),
        image,
    ),
    "squeeze-excite": (lambda: Head(SqueezeExcite(12), 12), image),
    "spatial gate": (lambda: Head(SpatialGate(), 8), image),
    "unet": (UNet, image),
    "shuffle": (lambda: Head(Shuffle(), 16), image),
    "ghost": (lambda: Head(Ghost(), 12), image),
    "fpn": (FPN, image),
    "c2f": (lambda: Head(C2f(), 8), image),
    "grouped": (lambda: Head(Grouped(), 8), image),
    "pixel shuffle": (PixelShuffleNet, image),
    "padded shortcut": (lambda: Head(Padded(), 16), image),
    "vit": (ViT, image),
    "vit by hand": (lambda: ViT(fused=False), image),
    "windows": (Windows, image),
    "convnext": (ConvNeXt, image),
    "mixer": (Mixer, image),
    "llama": (Llama, words),
    "rms norm by hand": (lambda: Tokens(RootMeanSquare), words),
    "rms norm by hand, one more": (lambda: Tokens(OneMoreThanTheWeight), words),
    "norm by length": (lambda: Tokens(Length), words),
    "norm by deviation": (lambda: Tokens(MeanAndDeviation), words),
    "norm without weights": (lambda: Tokens(WithoutWeights), words),
    "norm of pictures by hand": (lambda: Head(Pictures(), 8), image),
    "lstm": (lambda: Recurrent(nn.LSTM, batch_first=True), words),
    "lstm, two layers, both ways": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), words),
    "lstm with projections": (lambda: Recurrent(nn.LSTM, num_layers=2, proj_size=6), words),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True, batch_first=True), words),
    "rnn": (lambda: Recurrent(nn.RNN, num_layers=2, nonlinearity="relu", bias=False), words),
    "seq2seq": (Seq2Seq, words),
    "text cnn": (TextCNN, words),
    "glu": (Glu, words),
    "multihead": (lambda: TorchAttention(True, weights=True), words),
    "multihead, batch second": (lambda: TorchAttention(False), words),
    "multihead, other keys": (lambda: TorchAttention(True, kdim=12), words),
    "encoder": (lambda: Encoder(True, True), words),
    "encoder, batch second": (lambda: Encoder(False, False), words),
    "encoder-decoder": (EncoderDecoder, words),
    "bert": (Bert, masked_words),
    "fused qkv": (FusedQKV, image),
    "einsum": (EinsumAttention, words),
    "one head": (lambda: OneHead(True), words),
    "one head by hand": (lambda: OneHead(False), words),
    "rotary": (Rotary, words),
    "functional": (Functional, image),
    "nested": (Nested, nested),
    "norms": (lambda: Head(Norms(), 8), image),
    "mbconv": (lambda: Head(MBConv(), 8), image),
    "decoder": (Decoder, image),
    "video": (Video, video),
    "folds": (lambda: Head(Folds(), 8), image),
    "shared": (lambda: Shared(), image),
}
