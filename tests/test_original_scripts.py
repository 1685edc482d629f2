"""Small scripts in the style of the original's example folders; they use the original's public calls and nothing else.

Pruning scripts are in tests/sparse/test_original_prune_scripts.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.modules import QUpsample

CIFAR = """
BACKEND: virtual
SCHEDULE: {FUSE_BN: %s}
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER: {TYPE: %s, BIT: %d}
  SPECIFIC: [{"conv1": ["QUANTIZER.BIT", 8], "linear": ["QUANTIZER.BIT", 8]}]
A:
  QSCHEME: per-tensor-affine
  QUANTIZER: {TYPE: %s, BIT: %d}
  OBSERVER: {TYPE: MINMAX}
  QADD: {ENABLE_QUANT: True}
  SPECIFIC: [{"linear": ["QUANTIZER.BIT", 8]}]
"""


# -- data and nets that a few steps on a CPU can learn -----------------------------------------------------
def pictures(count: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Four classes: which quarter of the picture is bright."""
    labels = torch.arange(count) % 4
    images = 0.3 * torch.randn(count, 3, size, size)
    half = size // 2
    for image, label in zip(images, labels.tolist()):
        top, left = half * (label // 2), half * (label % 2)
        image[:, top : top + half, left : left + half] += 1
    return images, labels


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_classes: int = 4):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2))
        self.linear = nn.Linear(16, num_classes)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer2(self.layer1(out))
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int, lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    for step in range(steps):
        rows = torch.arange(32 * step, 32 * step + 32) % len(images)
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    images, labels = pictures(128)
    model = ResNet()
    train(model, images, labels, 30, 0.1)
    assert accuracy(model, images, labels) > 0.9
    return model, images, labels


def written(tmp_path, text: str) -> str:
    path = tmp_path / "qconfig.yaml"
    path.write_text(text)
    return str(path)


# -- post-training quantization ----------------------------------------------------------------------------
def test_cifar10_ptq(trained, tmp_path):
    model, images, labels = trained
    qconfig = parse_qconfig(written(tmp_path, CIFAR % (True, "uniform", 8, "uniform", 8)))
    qmodel = QuantModel(model, config=qconfig).to(qconfig.DEVICE)
    qmodel.eval()
    qmodel.prepare_calibration()
    with torch.no_grad():
        for data in images.split(64):
            qmodel(data.to(qconfig.DEVICE))
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    assert accuracy(qmodel, images, labels) > 0.9
    with torch.no_grad():
        qmodel.export_onnx(torch.randn(1, 3, 16, 16), name=str(tmp_path / "qresnet20.onnx"), extra_info=True)
    assert (tmp_path / "qresnet20.onnx").is_file() and (tmp_path / "qresnet20_extra.onnx").is_file()


def test_bn_tuning(trained, tmp_path):
    model, images, labels = trained
    text = (CIFAR % (False, "uniform", 4, "uniform", 8)).replace(
        "FUSE_BN: False", "FUSE_BN: True, BN_TUNING: True"
    )
    qconfig = parse_qconfig(written(tmp_path, text))
    qmodel = QuantModel(model, config=qconfig)
    qmodel.prepare_calibration()
    with torch.no_grad():
        for data in images.split(64):
            qmodel(data)
    qmodel.calc_qparams()
    if qconfig.SCHEDULE.BN_TUNING:
        with qmodel.batchnorm_tuning(), torch.no_grad():
            for data in images.split(64):
                qmodel(data)
    qmodel.set_quant(w_quant=True, a_quant=True)
    assert accuracy(qmodel, images, labels) > 0.9


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)
        x = (self.attn_drop(attn) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class DropPath(nn.Module):
    """Its forward asks for the training flag, as timm's does."""

    def forward(self, x):
        return x * torch.bernoulli(torch.full((len(x), 1, 1), 0.9)) if self.training else x


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm1, self.attn, self.drop_path = nn.LayerNorm(dim), Attention(dim, 2), DropPath()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, 4, 4)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class DeiT(nn.Module):
    def __init__(self, dim: int = 16):
        super().__init__()
        self.patch_embed = PatchEmbed(dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, dim))
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 4)

    def forward(self, x):
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


DEIT = """
BACKEND: virtual
SKIP_TRACE_MODULES: ["blocks.*.drop_path"]
W: {QSCHEME: per-channel-symmetric, QUANTIZER: {TYPE: %s, BIT: %d}}
A:
  QSCHEME: per-tensor-affine
  QUANTIZER: {TYPE: %s, BIT: %d}
  OBSERVER: {TYPE: MINMAX, LAYOUT: NLC}
"""


def test_deit_ptq(tmp_path):
    torch.manual_seed(0)
    images, labels = pictures(128)
    model = DeiT()
    train(model, images, labels, 60, 0.05)
    floating = accuracy(model, images, labels)
    qmodel = QuantModel(model, parse_qconfig(written(tmp_path, DEIT % ("uniform", 8, "uniform", 8))))
    qmodel.prepare_calibration()
    with torch.no_grad():
        for data in images.split(32):
            qmodel(data)
    qmodel.calc_qparams(asym=True, w_quant=True, a_quant=True)
    qmodel.set_quant(w_quant=True, a_quant=True)
    assert floating > 0.9 and accuracy(qmodel, images, labels) > floating - 0.05
    qmodel.export_onnx(images[:1], name=str(tmp_path / "deit.onnx"))


class Yolo(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1))
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Mish())
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.head = nn.Conv2d(24, 18, 1)

    def forward(self, x):
        small = self.stem(x)
        deep = self.down(small)
        wide = torch.cat([small, self.up(self.pool(deep))], dim=1)
        out = self.head(wide)
        B, _, H, W = out.shape
        out = out.view(B, 3, 6, H, W).permute(0, 1, 3, 4, 2).contiguous()
        return torch.sigmoid(out[..., :2]), torch.exp(out[..., 2:4]), out[..., 4:]


def test_yolo_ptq(tmp_path):
    text = """
BACKEND: tensorrt
SCHEDULE: {FUSE_BN: True}
W: {QSCHEME: per-channel-symmetric, QUANTIZER: {TYPE: uniform, BIT: 8}, OBSERVER: {TYPE: MINMAX}}
A: {QSCHEME: per-tensor-symmetric, QUANTIZER: {TYPE: uniform, BIT: 8}, OBSERVER: {TYPE: MSE}}
"""
    torch.manual_seed(0)
    model, images = Yolo().eval(), torch.randn(8, 3, 32, 32)
    qmodel = QuantModel(model, parse_qconfig(written(tmp_path, text)))
    qmodel.prepare_calibration()
    with torch.no_grad():
        for data in images.split(4):
            qmodel(data)
        qmodel.calc_qparams()
        qmodel.set_quant(w_quant=True, a_quant=True)
        for got, want in zip(qmodel(images), model(images)):
            assert F.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.99
        errors = qmodel.get_quantization_error(images, F.mse_loss, is_async=True)
    assert errors
    with open(tmp_path / "graph.md", "w") as f:
        qmodel.dump_mermaid(f)


# -- models of transformers, without an example ------------------------------------------------------------
BERT = """
BACKEND: virtual
W: {QSCHEME: per-channel-symmetric, QUANTIZER: {TYPE: uniform, BIT: 8}}
A:
  QSCHEME: per-tensor-affine
  QUANTIZER: {TYPE: uniform, BIT: 8}
  OBSERVER: {TYPE: PERCENTILE, LAYOUT: NLC}
  SPECIFIC: [{"*LayerNorm": ["QUANTIZER.DISABLE", True], "softmax*": ["QUANTIZER.DISABLE", True]}]
"""


def test_glue_ptq(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    batches = [torch.randint(0, 50, (4, length)) for length in (12, 12, 7)]
    qmodel = QuantModel(model, config=parse_qconfig(written(tmp_path, BERT)))
    qmodel.prepare_calibration()
    with torch.no_grad():
        for ids in batches:
            qmodel(ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids))
        qmodel.calc_qparams()
        qmodel.set_quant(w_quant=True, a_quant=True)
        for ids in batches:
            inputs = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
            got, want = qmodel(ids, **inputs).logits, model(ids, **inputs).logits
            assert 0 < float((got - want).abs().max()) < 0.1 * float(want.abs().max())


def test_wikitext_ptq(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2)
    )
    model.eval()
    ids = torch.randint(0, 50, (2, 16))
    qmodel = QuantModel(model, config=parse_qconfig(written(tmp_path, BERT)))
    qmodel.prepare_calibration()
    with torch.no_grad():
        qmodel(ids, labels=ids)
        qmodel.calc_qparams()
        qmodel.set_quant(w_quant=True, a_quant=True)
        got, want = qmodel(ids, labels=ids), model(ids, labels=ids)
    assert float(got.loss) == pytest.approx(float(want.loss), rel=0.01)
    assert float((got.logits - want.logits).abs().max()) > 0


# -- quantization-aware training ---------------------------------------------------------------------------
def with_8_bit_images(model: nn.Module, qconfig) -> QuantModel:
    qmodel = QuantModel(model, config=qconfig).to(qconfig.DEVICE)
    qmodel.model.conv1.input_quantizer.set_bit(bit=8)
    return qmodel


@pytest.mark.parametrize(
    "weights, features", [("lsq", "lsq"), ("dorefa", "pact"), ("dorefa", "uniform"), ("lsq+", "lsq+")]
)
def test_cifar10_qat(trained, tmp_path, weights, features):
    model, images, labels = trained
    qconfig = parse_qconfig(written(tmp_path, CIFAR % (False, weights, 4, features, 4)))
    qmodel = with_8_bit_images(model, qconfig)
    qmodel.prepare_calibration()
    with torch.no_grad():
        for data in images.split(64):
            qmodel(data)
    qmodel.init_QAT()
    before = accuracy(qmodel.eval(), images, labels)
    train(qmodel, images, labels, 12, 0.02)
    after = accuracy(qmodel, images, labels)
    assert after > 0.85 and after >= before - 0.05
    resumed = with_8_bit_images(ResNet(), qconfig)
    resumed.load_state_dict(qmodel.state_dict())
    resumed.set_quant(w_quant=True, a_quant=True)
    assert accuracy(resumed.eval(), images, labels) == after
    qmodel.export_onnx(images[:1], name=str(tmp_path / "qat.onnx"), extra_info=True)


def test_deit_qat(tmp_path):
    torch.manual_seed(0)
    images, labels = pictures(128)
    model = DeiT()
    train(model, images, labels, 60, 0.05)
    qmodel = QuantModel(model, parse_qconfig(written(tmp_path, DEIT % ("lsq", 4, "lsq", 4))))
    for name in ("patch_embed_proj", "head"):
        layer = getattr(qmodel.model, name)
        layer.input_quantizer.set_bit(bit=8)
        layer.weight_quantizer.set_bit(bit=8)
    qmodel.prepare_calibration()
    with torch.no_grad():
        qmodel(images)
    qmodel.init_QAT()
    train(qmodel, images, labels, 12, 0.01)
    assert accuracy(qmodel, images, labels) > 0.85


class Bev(nn.Module):
    """Several cameras in a list of inputs; `metas` is for the detector around it."""

    def __init__(self):
        super().__init__()
        self.img_backbone_conv1 = nn.Conv2d(3, 8, 3, 2, 1)
        self.bn1 = nn.BatchNorm2d(8)
        self.neck_up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, img_inputs, metas):
        images, shift = img_inputs
        B, N, C, H, W = images.shape
        x = F.relu(self.bn1(self.img_backbone_conv1(images.view(B * N, C, H, W))))
        x = self.neck_up(x)
        x = x.view(B, N, 8, H, W).mean(1) + shift
        return [self.head(x)]


def test_bev_qat(tmp_path):
    text = """
BACKEND: virtual
SCHEDULE: {FUSE_BN: False}
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER: {TYPE: lsq, BIT: 4}
  SPECIFIC: [{"img_backbone_conv1": ["QUANTIZER.BIT", 8], "head*": ["QUANTIZER.BIT", 8]}]
A: {QSCHEME: per-tensor-affine, QUANTIZER: {TYPE: lsq, BIT: 4}}
"""
    torch.manual_seed(0)
    model = Bev()
    inputs = [torch.randn(2, 3, 3, 16, 16), torch.randn(1)]
    qmodel = QuantModel(model, parse_qconfig(written(tmp_path, text)))
    for m in qmodel.model.modules():
        if isinstance(m, QUpsample):
            m.input_quantizer.set_fake_fused()
    qmodel.prepare_calibration()
    with torch.no_grad():
        qmodel(inputs)
    qmodel.init_QAT()
    optimizer = torch.optim.AdamW(qmodel.parameters(), lr=1e-2)
    target = torch.randn(2, 4, 16, 16)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        (out,) = qmodel(inputs)
        losses.append(F.mse_loss(out, target))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert qmodel.model.img_backbone_conv1.weight_quantizer.bit == 8
