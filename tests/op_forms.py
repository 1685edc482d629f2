"""The table of call forms: each is an expression, which is also its name.

`F.relu(x)` is computed by the model from its inputs; `nn.Conv2d(4, 6, 3)` is a layer that gets the inputs;
`nn.ReLU() | m(input=x)` is a layer and how it is called; `w` is a parameter of the model. `[IMAGE] 1` says what the
forms below take, and how many quantizers each must have: weights, inputs, one per factor of a product.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TABLE = """
-- layers with a weight
[SIGNAL] 2
nn.Conv1d(4, 6, 3); nn.Conv1d(4, 6, 3, 2, 1, 2, 2, False, "circular"); nn.Conv1d(4, 6, 2, padding="same")
nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1); nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False)
nn.ConvTranspose1d(4, 6, 3, 2) | m(x, output_size=[22]); nn.Conv1d(4, 6, 3) | F.relu(m(x))
nn.Conv1d(4, 6, 3) | m(x[0]); F.conv1d(x, w[:, :, None]); F.conv1d(x, w[:, :, None] * 2)
F.conv1d(x * 1, w[:, :2, None], groups=2)
[IMAGE] 2
nn.Conv2d(4, 6, 3); nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect") | m(input=x); nn.Conv2d(4, 4, 3, groups=4)
nn.Conv2d(4, 6, 3, padding="same", padding_mode="replicate", dilation=2); nn.Conv2d(4, 6, 3) | torch.relu(m(x))
nn.Conv2d(4, 6, (1, 3), stride=(2, 1), bias=False); MyConv(4, 6, 3); nn.Conv2d(4, 6, 3) | m(x).relu_()
nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2)
nn.ConvTranspose2d(4, 6, 3, 2) | m(x, [18, 18]); nn.Conv2d(4, 6, 1) | F.hardswish(m(x))
nn.Conv2d(4, 6, 1) | F.relu6(m(x)); nn.Conv2d(4, 6, 3) | torch.clamp(m(x), 0, 6)
nn.Conv2d(4, 6, 3) | m(x) * torch.exp(-x.amax()); F.conv2d(x, w.sin()[:, :, None, None])
F.conv2d(weight=w[:, :, None, None].exp(), input=x, stride=2); F.linear(x, w.repeat(3, 2))
F.linear(bias=w.sum(0), weight=w.repeat(1, 2) * 2, input=x); F.conv_transpose2d(x, w.view(4, 4, 1, 1).abs())
[VOLUME] 2
nn.Conv3d(4, 6, 3); nn.Conv3d(4, 6, 2, padding=1, padding_mode="circular", groups=2); nn.Conv3d(4, 6, 3) | F.elu(m(x))
nn.ConvTranspose3d(4, 6, 2, stride=2); nn.ConvTranspose3d(4, 6, 2, groups=2, bias=False)
[TOKENS] 2
nn.Linear(6, 3); nn.Linear(6, 3, bias=False) | m(input=x); nn.Linear(6, 3) | F.gelu(m(x))
nn.Linear(6, 3) | m(x).view(2, -1); nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)); nn.Linear(6, 3) | -m(x)
[TOKENS, TOKENS] 3
nn.Bilinear(6, 6, 4); nn.Bilinear(6, 6, 4, bias=False) | m(input2=y, input1=x)
F.bilinear(x, y, torch.stack([w.repeat(2, 2)[:6, :6] * 2]))
[(INT, 2, 3)] 1
nn.Embedding(10, 6); nn.Embedding(10, 6, padding_idx=1, max_norm=1.0); nn.EmbeddingBag(10, 6)
nn.Embedding(5, 4) | m(input=x).sum(1); nn.EmbeddingBag(10, 6, mode="max", padding_idx=2)
nn.EmbeddingBag(4, 6, mode="sum") | m(x.flatten(), torch.arange(2) * 3); F.embedding(x, w * 2)
F.embedding(weight=w + 1, input=x); F.embedding_bag(x, w * 2, mode="sum")

-- activations
[TOKENS] 1
nn.ReLU(); MyRelu(); F.relu(x); F.relu(input=x); torch.relu(x); x.relu(); x.relu_(); F.relu(x, inplace=True)
torch.relu_(x)
F.relu(x, True); nn.ReLU(inplace=True); nn.ReLU() | m(input=x); nn.ReLU6(); F.relu6(x); F.relu6(x, inplace=False)
nn.Sequential(nn.ReLU()); nn.LeakyReLU(0.3); F.leaky_relu(x, negative_slope=0.2); F.leaky_relu(x, 0.2); nn.RReLU()
F.rrelu(x); nn.PReLU(); nn.PReLU(5); F.prelu(x, w[0, :1]); F.prelu(weight=w[0, :1], input=x); x.prelu(w[0, :1])
nn.ELU(0.7); F.elu(x, alpha=0.7); nn.SELU(); F.selu(x); torch.selu(x); nn.CELU(1.3); F.celu(x, 1.3); nn.GELU()
nn.GELU(approximate="tanh"); F.gelu(x); F.gelu(x, approximate="tanh"); nn.SiLU(); nn.SiLU(inplace=True); F.silu(x)
nn.Mish(); F.mish(x); nn.Hardswish(); F.hardswish(x); nn.Sigmoid(); F.sigmoid(x); torch.sigmoid(x); x.sigmoid()
torch.special.expit(x); x.sigmoid_(); nn.Tanh(); F.tanh(x); torch.tanh(x); x.tanh(); nn.Hardsigmoid()
F.hardsigmoid(x); nn.Hardtanh(-0.5, 0.7); F.hardtanh(x, max_val=0.5); nn.Threshold(0.1, 0.2); F.threshold(x, 0.1, 0.2)
nn.Softplus(2, 10); F.softplus(x, beta=2); nn.Softsign(); F.softsign(x); nn.LogSigmoid(); F.logsigmoid(x)
nn.Hardshrink(0.1); F.hardshrink(x, 0.3); x.hardshrink(0.1); nn.Softshrink(); F.softshrink(x); nn.Tanhshrink()
F.tanhshrink(x); nn.GLU(); F.glu(x); F.glu(dim=2, input=x); nn.Softmax(dim=1); F.softmax(x, -1)
F.softmax(dim=-1, input=x); torch.softmax(x, 1); x.softmax(-1); x.softmax(dim=1)
torch.softmax(x, dim=2, dtype=torch.float64); nn.Softmin(dim=1); F.softmin(x, 1); nn.LogSoftmax(dim=-1)
F.log_softmax(x, 1); torch.log_softmax(x, -1); x.log_softmax(dim=1); F.softmax(x.masked_fill(x > 0.5, -inf), -1)
torch.softmax(x.masked_fill(x < 0, -1e9), dim=1); (x.triu() + torch.full((5, 6), -inf).triu(2)).softmax(-1)
[IMAGE] 1
nn.Softmax2d(); nn.PReLU(4); F.prelu(x, w[0]); nn.Softmax(dim=-1) | m(input=x)

-- norms
[SIGNAL] 0
nn.InstanceNorm1d(4); nn.InstanceNorm1d(4, affine=True); F.instance_norm(x); nn.GroupNorm(2, 4)
nn.InstanceNorm1d(4) | m(x[0])
[IMAGE] 0
nn.GroupNorm(2, 4, eps=0.1, affine=False); nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
F.group_norm(x, 2); F.group_norm(x, num_groups=4, weight=w[0], bias=w[1]); nn.LocalResponseNorm(3, alpha=0.1)
F.local_response_norm(x, size=2); nn.LayerNorm([4, 8, 8]); torch.group_norm(x, 2); nn.GroupNorm(4, 4) | m(input=x)
nn.CrossMapLRN2d(2)
[VOLUME] 0
nn.InstanceNorm3d(4); nn.GroupNorm(1, 4)
[TOKENS] 0
nn.LayerNorm(6); nn.LayerNorm((5, 6), eps=0.1, elementwise_affine=False); nn.LayerNorm(6, bias=False)
F.layer_norm(x, (6,)); F.layer_norm(normalized_shape=[6], input=x); torch.layer_norm(x, (5, 6)); nn.RMSNorm(6)
F.rms_norm(x, (6,), eps=1e-3); nn.RMSNorm(6, eps=0.1, elementwise_affine=False); F.layer_norm(x, (6,), bias=x[0, 0])
[SIGNAL] 0
nn.BatchNorm1d(4); nn.BatchNorm1d(4, affine=False); nn.BatchNorm1d(10) | m(x[0])
[IMAGE] 0
nn.BatchNorm2d(4); nn.BatchNorm2d(4, track_running_stats=False); nn.SyncBatchNorm(4)
F.batch_norm(x, x.amax((0, 2, 3)), x.var((0, 2, 3)))
[VOLUME] 0
nn.BatchNorm3d(4); nn.BatchNorm3d(4) | m(input=x)

-- pools and resampling
[SIGNAL] 1
nn.AvgPool1d(3, 2, 1); F.avg_pool1d(x, 2); nn.AdaptiveAvgPool1d(3); F.adaptive_avg_pool1d(x, 4); nn.LPPool1d(2, 3)
F.lp_pool1d(x, 2.0, 2); nn.Upsample(scale_factor=2, mode="linear"); x.mean(-1)
torch.mean(x, dim=(1, 2), keepdim=True); x.mean(); torch.mean(input=x, dim=1)
[IMAGE] 1
nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False); nn.AvgPool2d(2, divisor_override=3)
F.avg_pool2d(x, 2, ceil_mode=True); F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
nn.AdaptiveAvgPool2d((None, 3)); F.adaptive_avg_pool2d(x, 1); F.adaptive_avg_pool2d(input=x, output_size=(2, 3))
nn.LPPool2d(2, 2, ceil_mode=True); F.lp_pool2d(x, 2, 3); nn.Upsample(size=(5, 7), mode="bilinear", align_corners=True)
nn.Upsample(scale_factor=2, mode="bicubic"); nn.UpsamplingBilinear2d(size=5)
F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False); F.interpolate(x, (3, 3), None, "area")
F.interpolate(x, size=5, mode="bilinear", antialias=True); F.upsample(x, scale_factor=2, mode="bilinear")
x.mean([2, 3])
F.grid_sample(x, torch.linspace(-1, 1, 36).view(1, 3, 6, 2).tile(2, 1, 1, 1), align_corners=True, padding_mode="border")
[VOLUME] 1
nn.AvgPool3d(2, padding=1); F.avg_pool3d(x, (2, 1, 2)); nn.AdaptiveAvgPool3d(2)
F.adaptive_avg_pool3d(x, (1, 2, None)); nn.LPPool3d(2, 2); F.interpolate(x, scale_factor=2, mode="trilinear")
[SIGNAL] 0
nn.MaxPool1d(3, 2, 1); F.max_pool1d(x, 2); nn.AdaptiveMaxPool1d(3); F.adaptive_max_pool1d(x, 4)
torch.max_pool1d(x, 2)
[IMAGE] 0
nn.MaxPool2d(3, 2, 1, dilation=2, ceil_mode=True); nn.MaxPool2d(2, return_indices=True); F.max_pool2d(x, 2)
F.max_pool2d(x, 3, 2, 1, 1, True); F.max_pool2d(x, 2, return_indices=True)[1]; nn.AdaptiveMaxPool2d(2)
F.adaptive_max_pool2d(x, (1, 2)); nn.FractionalMaxPool2d(2, output_size=3)
nn.MaxUnpool2d(2) | (lambda p: m(p[0], p[1]))(F.max_pool2d(x, 2, return_indices=True))
nn.AdaptiveMaxPool2d(2, return_indices=True) | m(x)[0]; nn.Upsample(scale_factor=2); F.interpolate(x, (3, 3))
F.interpolate(x, scale_factor=2, mode="nearest-exact"); nn.UpsamplingNearest2d(scale_factor=2)
F.affine_grid(x[:, 0, :2, :3], (2, 1, 4, 4))
F.grid_sample(x, x[:, 0, :, :2].unsqueeze(1) / 4, "nearest", align_corners=False)
[VOLUME] 0
nn.MaxPool3d(2); F.max_pool3d(x, 2, padding=1); nn.AdaptiveMaxPool3d(2); nn.FractionalMaxPool3d(2, output_ratio=0.5)

-- products of activations: one quantizer per factor
[BATCH, BATCH] 2
x @ y; torch.matmul(x, y); x.matmul(y); torch.matmul(other=y, input=x); torch.bmm(x, y); x.bmm(y); x.bmm(mat2=y)
torch.mm(x[0], y[0]); torch.mv(x[0], y[0, 0]); torch.dot(x[0, 0], y[0, 0]); torch.vdot(x[0, 0], y[0, 0])
torch.inner(x, y); torch.tensordot(x, y, dims=([1, 2], [1, 2])); torch.einsum("bij,bjk->bik", x, y)
torch.einsum("bij,bkj", [x, y]); torch.baddbmm(x, x, y); torch.baddbmm(x + 1, x, y, beta=0.5)
x.baddbmm(x * 2, y, alpha=2.0); torch.addbmm(x[0], x, batch2=y); torch.addmm(x[0], mat1=x[1], mat2=y[0])
torch.addmv(x[0, 0], x[1], y[1, 0]); x @ y.transpose(1, 2); x @ y.mT; operator.imatmul(x * 1, y)
torch.linalg.multi_dot([x[0], y[0]]); torch.linalg.vecdot(x, y); x @ F.pad(y, (0, 1))
[BATCH] 1
x @ x; torch.einsum("bij,bkj->bik", x, x); x.matmul(x)
[BATCH] 2
F.scaled_dot_product_attention(x, x, x)
[BATCH, BATCH, BATCH] 3
torch.chain_matmul(x[0], y[0], z[0]); torch.einsum("bij,bjk,bkl->bil", x, y, z)

-- attention: its three inputs and the probabilities
[BATCH, BATCH, BATCH] 4
F.scaled_dot_product_attention(x, y, z); F.scaled_dot_product_attention(x, y, z, is_causal=True, scale=0.3)
F.scaled_dot_product_attention(query=x, value=z, key=y, attn_mask=torch.ones(6, 6, dtype=torch.bool).tril())
F.scaled_dot_product_attention(x, y, z, torch.full((6, 6), -inf).triu(1))
[BATCH, BATCH] 2
x + y; torch.add(x, y); torch.add(x, y, alpha=3); x.add(y); x.add(other=y, alpha=0.5); x.add_(y); operator.iadd(x, y)
torch.add(other=y, input=x)
[BATCH] 0
x + 1; 1 + x; torch.add(x, 2); torch.einsum("bii->b", x); x.add(0.5); torch.outer(x[0, 0], x[0, 1])
torch.kron(x[0], x[1]); torch.linalg.inv(x)

-- arithmetic, comparisons, reductions: float
[TOKENS] 0
x.mean(-1, keepdim=True)
1 - x; x - 1; torch.sub(x, 2, alpha=3); x.sub(1); torch.rsub(x, 1); x.subtract(2); x * 3; 3 * x; torch.mul(x, 2)
x.mul_(2); x.multiply(x); 2 / (x + 9); x / 2; torch.div(x, 3, rounding_mode="floor"); torch.true_divide(x, 2)
x.div(0.5); x // 2; 7 // (x + 9); torch.floor_divide(x, 2); x % 3; torch.remainder(x, 2); torch.fmod(x, 0.7); -x; +x
torch.neg(x); x.neg(); abs(x); torch.abs(x); x.abs(); x ** 2; 2 ** x; torch.pow(x, 3); x.pow(exponent=2)
torch.pow(2, x); x.square(); torch.sqrt(x.abs()); x.abs().sqrt(); torch.rsqrt(x.abs() + 1); x.exp(); torch.exp(x)
torch.expm1(x); torch.log(x.abs() + 1); x.abs().log1p(); torch.log2(x.abs() + 1); torch.clamp(x, -1, 1)
x.clamp(min=0); x.clamp_(max=0.5); torch.clip(x, min=x.amin((0, 1)) / 2); torch.clamp(x, max=torch.tensor(0.5))
x.clamp_min(0.1); torch.maximum(x, x * 2); torch.minimum(x, other=-x); x.round(); torch.round(x, decimals=1)
x.floor(); torch.ceil(x); x.trunc(); x.sign(); torch.sin(x); x.cos(); torch.atan2(x, x + 9); torch.erf(x)
x.reciprocal(); torch.lerp(x, -x, 0.3); torch.addcmul(x, x, x, value=0.5); torch.logaddexp(x, -x); torch.nan_to_num(x)
F.normalize(x, dim=1); F.normalize(x, p=1.0); torch.hypot(x, x); torch.special.xlogy(x, x.abs() + 1); torch.sinc(x)
x > 0; x < 0.5; x >= 0; x <= 0; x == x; x != 0; 0 < x; torch.eq(x, 0); torch.gt(x, 0); x.lt(0); x.ne(other=1)
torch.isclose(x, x); torch.isnan(x); x.isfinite(); (x > 0) & (x < 1); (x > 0) | (x < -1); ~(x > 0); (x > 0) ^ (x > 1)
torch.logical_and(x > 0, x < 1); (x > 0).logical_not(); torch.equal(x, x); x.sum(); torch.sum(x, 1)
x.sum(dim=(0, 2), keepdim=True); x.sum(-1, dtype=torch.float64); x.prod(1); torch.amax(x, (1, 2)); x.amin(dim=1)
x.max(); torch.max(x, 1); torch.max(x, dim=1)[0]; torch.max(x, -x); x.min(1).values; x.min(dim=-1, keepdim=True)[1]
x.argmax(1); torch.argmax(x); x.argmin(dim=-1); x.var(1); torch.var(x); torch.std(x, dim=1, unbiased=False)
x.std((1, 2), keepdim=True); torch.var_mean(x, 1); torch.norm(x); x.norm(dim=1); x.norm(p=1)
torch.linalg.norm(x, dim=-1); torch.linalg.vector_norm(x, 2, -1); x.cumsum(1); torch.cumprod(x, dim=1)
torch.logsumexp(x, 1); x.logsumexp(dim=(1, 2)); x.median(); torch.quantile(x, 0.3); x.any(); torch.all(x > -99)
(x > 0).sum(); torch.count_nonzero(x); x.kthvalue(2, 1); torch.diff(x); x.aminmax(dim=1); torch.cdist(x, x)
F.cosine_similarity(x, -x + 1, dim=-1); nn.CosineSimilarity() | m(x, x + 1); F.pairwise_distance(x, x + 1)
torch.fft.fft(x).abs(); torch.fft.rfft2(x).real; torch.view_as_real(torch.fft.fft(x)); F.mse_loss(x, x * 2)
nn.L1Loss() | m(x, x + 1); F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(1)); operator.imul(x, 2)
operator.isub(x, 1); operator.itruediv(x, 2)

-- shapes
[TOKENS] 0
nn.Flatten(); nn.Flatten(0, 1); torch.flatten(x, 1); x.flatten(); torch.flatten(start_dim=1, input=x)
nn.Unflatten(2, (2, 3)); x.unflatten(-1, (2, -1)); torch.unflatten(x, 2, (3, 2)); x.ravel(); x.reshape(2, -1)
x.reshape((10, 6)); torch.reshape(x, (x.shape[0], -1)); x.view(x.size(0), -1); x.view(x.size()); x.view((-1, 3))
x.view_as(x.clone()); x.reshape_as(x); torch.cat([x, x]); torch.cat((x, x * 2), dim=-1)
torch.cat(tensors=[x, x], dim=1); torch.concat([x, x], 1); torch.stack([x, x], 1); torch.stack((x, x))
torch.hstack([x, x]); torch.vstack((x, x)); x[:1].expand(3, -1, -1); x[:1].expand((2, 5, 6)); x[:1].expand_as(x)
torch.broadcast_to(x[:1], (2, 5, 6)); torch.broadcast_tensors(x, x[:1])[1]; x.transpose(1, 2)
torch.transpose(x, dim0=0, dim1=1); x[0].t(); x[0].T; x.mT; torch.swapaxes(x, 0, 1); x.swapdims(1, 2)
x.permute(2, 0, 1); x.permute((0, 2, 1)); torch.permute(x, (1, 0, 2)); x.permute(dims=(2, 1, 0)); x.movedim(0, -1)
torch.moveaxis(x, 0, 1); x.unsqueeze(1); torch.unsqueeze(x, -1); x.unsqueeze(dim=0); x.unsqueeze(0).squeeze()
torch.squeeze(x[:, :1], dim=1); x[:, :1].squeeze(1); torch.atleast_3d(x[0]); x.chunk(2, dim=-1)[0]
torch.chunk(x, 2, 2); torch.split(x, 2, dim=1)[1]; x.split([2, 4], -1); x.split(split_size=3, dim=2)[0]
torch.tensor_split(x, 3, dim=2)[2]; torch.hsplit(x, [2])[0]; x.vsplit(2)[1]; x.unbind(1)[2]
torch.unbind(x, dim=-1)[0]; x.unbind(); x.repeat(1, 2, 1); x.repeat((2, 1, 1)); x.tile((2,)); torch.tile(x, (1, 2))
x.repeat_interleave(2, dim=1); torch.repeat_interleave(x, 3, -1); x.flip(1); torch.flip(x, dims=(0, 1)); x.roll(1, 1)
torch.roll(x, shifts=(1, 2), dims=(1, 2)); torch.rot90(x, 1, (1, 2)); x.tril(); torch.triu(x, diagonal=1)
x[0].diagonal(); torch.diag(x[0, 0]); torch.diag_embed(x); x.diagonal(dim1=1, dim2=2); torch.fliplr(x)
x.narrow(1, 0, 2); torch.narrow(x, 2, 1, 3); x.select(1, 0); torch.select(x, 1, -1); x.unfold(2, 3, 1)
torch.meshgrid(x[0, 0], x[1, 0], indexing="ij"); x.clone(); torch.clone(x); x.contiguous(); x.detach(); x.shape
x.size(); x.size(1); x.size(dim=-1); x.dim(); x.ndim; x.numel(); torch.numel(x); x.dtype; x.device; x * x.shape[1]
x.new_zeros(x.shape[0]); x + math.sqrt(x.shape[-1]); x.is_floating_point(); x.reshape(-1, math.prod([2, 3]))
[IMAGE] 0
nn.PixelShuffle(2); F.pixel_shuffle(x, 2); nn.PixelUnshuffle(2); F.pixel_unshuffle(x, downscale_factor=2)
nn.ChannelShuffle(2); F.channel_shuffle(x, 2); nn.Unfold(3, padding=1); F.unfold(x, 2, stride=2)
F.fold(x.flatten(2)[:, :, :49], (8, 8), 2); nn.Fold((3, 3), 2) | m(x.flatten(2)[:, :, :4]); F.pad(x, (1, 2))
F.pad(x, (1, 1, 2, 0), mode="reflect"); F.pad(x, [1, 1], "constant", 0.5); F.pad(x, pad=(0, 0, 0, 0, 1, 1))
nn.ZeroPad2d(1); nn.ReflectionPad2d((1, 0, 2, 1)); nn.ReplicationPad2d(2); nn.ConstantPad2d(1, 3.5)
nn.CircularPad2d(1); nn.ZeroPad2d((1, -1, 0, 2)); x.to(memory_format=torch.channels_last)
[SIGNAL] 0
nn.ReflectionPad1d(2); nn.ConstantPad1d((1, 2), 0.5); nn.ReplicationPad1d(1); nn.CircularPad1d(2); nn.ZeroPad1d(1)
nn.AlphaDropout(); nn.Dropout1d(); F.dropout1d(x, training=False)
[VOLUME] 0
nn.ReplicationPad3d(1); nn.ConstantPad3d(1, 1.0); nn.ReflectionPad3d(1); nn.CircularPad3d(1); nn.ZeroPad3d(1)
nn.Dropout3d()

-- indexing, sorting, creation, casts, dropout
[TOKENS, (INT, 2, 5, 6)] 0
x[0]; x[:, 1]; x[..., 0]; x[:, None]; x[..., None, :]; x[1:, ::2]; x[:, -1]; x[:, [0, 2]]; x[x > 0]; x[0, 1:3, :]
x[None]; x[:, y[0, 0]]; x[torch.arange(2), y[:, 0, 0]]; x[:, :x.shape[1] // 2]; x[...]; x[True]; torch.gather(x, 1, y)
x.gather(dim=-1, index=y); x.take_along_dim(y, 1); torch.index_select(x, 1, y[0, 0])
x.index_select(dim=2, index=y[1, 0]); x.take(y); x.masked_select(x > 0); torch.masked_select(x, x < 0)
x.masked_fill(x > 0, 0.0); torch.masked_fill(x, y == 1, -1.0); x.masked_fill(mask=y > 1, value=5)
torch.where(x > 0, x, -x); torch.where(y == 1, x, 0.0); x.where(x > 0, x * 2); torch.where(x > 0)[0]
x.scatter(1, y, x); torch.scatter(x, 1, y, 0.5); x.scatter_add(1, y, x); x.index_add(1, y[0, 0, :1], x[:, :1])
x.index_fill(1, y[0, 0], 2.0); x.index_copy(1, torch.arange(5), x * 2); torch.nonzero(x > 0)
x.scatter_reduce(1, y, x, "amax"); x.masked_fill_(y > 1, 1.0); x.index_put((y[:, 0, 0] * 0,), x[:2] * 0)
torch.select_scatter(x, x[:, 0], 1, 2); torch.slice_scatter(x, x[:, :1] * 2, 1, 0, 1); x.sort()
torch.sort(x, dim=1, descending=True)[0]; x.argsort(-1); torch.argsort(x, dim=0); x.topk(2)
torch.topk(x, 3, dim=1)[0]; x.topk(k=2, dim=-1, largest=False).values; torch.unique(y)
torch.bucketize(x, torch.tensor([0.0, 1.0])); torch.searchsorted(torch.tensor([0.0, 1.0]), x); F.one_hot(y, 4)
F.one_hot(y, num_classes=5).sum(); torch.zeros_like(x); torch.ones_like(x, dtype=torch.int64); torch.full_like(x, 2.0)
torch.rand_like(x); torch.empty_like(x).shape; x.new_zeros(2, 3); x.new_ones((2,)); x.new_full((2, 2), 3.0)
torch.zeros(x.shape); torch.ones(x.size(0), 3); torch.arange(x.shape[2]) * y; torch.arange(0, x.shape[1], 2)
torch.full((x.size(0), 2), 1.5); torch.linspace(0, 1, x.size(1)); torch.eye(x.size(-1))
torch.zeros(x.shape[0], x.shape[1], device=x.device); torch.randn_like(x); torch.bernoulli(x.cos().abs()); x.float()
x.half(); x.double(); x.bfloat16(); x.to(torch.float64); x.to(dtype=torch.float16); x.to(x.device); x.to(y); x.long()
x.int(); x.bool(); x.type_as(y); x.type(torch.float64); y.float(); y.to(x.dtype); x.cpu(); x.to("cpu", torch.float64)
nn.Dropout(0.5) | m(x); nn.Dropout2d() | m(x); nn.FeatureAlphaDropout() | m(x); F.dropout(x, 0.5, False)
F.dropout(x, p=0.2, training=m is not None); torch.dropout(x, 0.5, train=False); F.alpha_dropout(x)
F.feature_alpha_dropout(x); F.dropout2d(x, training=False); x.requires_grad; torch.is_floating_point(x)
y.bitwise_and(1); y << 1; y >> 1; y & 1; y ^ 1; torch.bitwise_not(y); torch.stack(x.unbind(1))
torch.cat(x.split(2, 1), 1); torch.cat(torch.chunk(x, 3), 0)
[(2, 4)] 0
F.gumbel_softmax(x); torch.multinomial(x.abs() + 1, 2); torch.einsum("ij->ji", x); torch.trace(x)
torch.cross(x[:, :3], x[:, 1:], dim=1); torch.cov(x); torch.linalg.svd(x)[1]; torch.linalg.det(x[:, :2])
torch.poisson(x.abs())

-- forms that write into a view of a tensor that is not read afterwards
[TOKENS] 1
x[0].relu_()
[TOKENS] 0
x.view(-1).mul_(2)

-- forms that write into a tensor which others may see stay as they are, by name
[TOKENS] 0 stays
(x[0].relu_(), x.flatten())[1]; (x.view(-1).mul_(2), x.flatten())[1]; operator.setitem(x, 0, 1.0) or x
torch.add(x, x, out=torch.empty(2, 5, 6))
"""


SHAPES: dict[str, Any] = {
    "SIGNAL": (2, 4, 10),
    "IMAGE": (2, 4, 8, 8),
    "VOLUME": (1, 4, 5, 6, 6),
    "TOKENS": (2, 5, 6),
    "BATCH": (2, 6, 6),
    "INT": "int",  # indices below 4
}


class MyConv(nn.Conv2d):
    """A subclass that keeps the forward."""


class MyRelu(nn.ReLU):
    pass


NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "math": math,
    "operator": operator,
    "inf": math.inf,
    "MyConv": MyConv,
    "MyRelu": MyRelu,
}


class Model(nn.Module):
    """A layer `m`, if the text starts with one, a parameter `w`, and the expression that forward returns."""

    def __init__(self, text: str, inputs: int):
        super().__init__()
        names = ", ".join(["x", "y", "z"][:inputs])
        layer, _, call = text.partition(" | ") if text.startswith(("nn.", "My")) else ("None", "", text)
        self.m = eval(layer, NAMES)
        self.w = nn.Parameter(torch.randn(4, 4) * 0.5)
        self.call = eval(f"lambda m, w, {names}: {call or f'm({names})'}", NAMES)


class One(Model):
    def forward(self, x: Any) -> Any:
        return self.call(self.m, self.w, x)


class Two(Model):
    def forward(self, x: Any, y: Any) -> Any:
        return self.call(self.m, self.w, x, y)


class Three(Model):
    def forward(self, x: Any, y: Any, z: Any) -> Any:
        return self.call(self.m, self.w, x, y, z)


@dataclass(frozen=True)
class Form:
    """One call form: the expression, the shapes of its inputs, how many quantizers it must have."""

    text: str
    shapes: tuple[Any, ...]
    quantizers: int
    stays: bool = False  # by nature float: named in float_ops

    def model(self) -> nn.Module:
        torch.default_generator.manual_seed(0)
        return (One, Two, Three)[len(self.shapes) - 1](self.text, len(self.shapes)).eval()

    def batch(self, seed: int) -> tuple[Tensor, ...]:
        g = torch.Generator().manual_seed(seed)
        return tuple(
            torch.randint(0, 4, s[1:], generator=g) if s[0] == "int" else torch.randn(s, generator=g)
            for s in self.shapes
        )


def forms() -> Iterator[Form]:
    """The table, form by form."""
    shapes, quantizers, stays = (), 0, False
    for line in TABLE.splitlines():
        header = re.fullmatch(r"(\[.*\]) (\d)( stays)?", line)
        if header:
            shapes, quantizers, stays = tuple(eval(header[1], SHAPES)), int(header[2]), bool(header[3])
        elif line and not line.startswith("--"):
            for text in line.split("; "):
                yield Form(text, shapes, quantizers, stays)


FORMS = list(forms())
