"""Checkpoints of other programs: folders as llmcompressor 0.14 and GPTQModel 7 write them, built by hand, are read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sparsebit import llm
from sparsebit.errors import ConfigError


class Tiny(nn.Module):
    """Two packed layers, one ignored; named as in a decoder."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 16, bias=False), nn.Linear(16, 64)])
        self.lm_head = nn.Linear(64, 8, bias=False)

    def forward(self, x):
        return self.lm_head(self.layers[1](torch.relu(self.layers[0](x))))


def llmcompressor_config(symmetric: bool, group: int) -> dict:
    """Word for word what llmcompressor 0.14.0.1 wrote for W4A16, beside the numbers."""
    weights = {
        "actorder": "static", "block_structure": None, "dynamic": False, "group_size": group, "num_bits": 4,
        "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "group",
        "symmetric": symmetric, "type": "int", "zp_dtype": None if symmetric else "torch.int8",
    }  # fmt: skip
    group_0 = {
        "format": "pack-quantized", "input_activations": None, "output_activations": None,
        "targets": ["Linear"], "weights": weights,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group_0}, "format": "pack-quantized", "global_compression_ratio": None,
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.19.0",
    }  # fmt: skip


def words_by_hand(values: torch.Tensor) -> torch.Tensor:
    """Eight 4-bit values of a row in one int32, the first in the lowest bits."""
    columns = values.long().unflatten(-1, (-1, 8))
    words = sum(columns[..., i] << (4 * i) for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def signed(shape) -> torch.Tensor:
    """Random values of int4 with both ends among them."""
    values = torch.randint(-8, 8, shape)
    values.view(-1)[0], values.view(-1)[-1] = -8, 7
    return values


def layer(name: str, outputs: int, inputs: int, group: int, symmetric: bool):
    """(tensors as compressed-tensors names them, the weight they mean)."""
    q, scales = signed((outputs, inputs)), torch.rand(outputs, inputs // group) + 0.01  # scales in float32
    zeros = torch.zeros(outputs, inputs // group, dtype=torch.long) if symmetric else signed(scales.shape)
    weight = (q - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)
    tensors = {
        f"{name}.weight_packed": words_by_hand(q + 8),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        tensors[f"{name}.weight_zero_point"] = words_by_hand((zeros + 8).T).T.contiguous()
    return tensors, weight


def write(folder, tensors, config) -> None:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


@pytest.mark.parametrize("symmetric", [True, False])
def test_llmcompressor(tmp_path, symmetric):
    torch.manual_seed(0)
    model, tensors = Tiny(), {}
    for i, linear in enumerate(model.layers):
        packed, weight = layer(f"layers.{i}", linear.out_features, linear.in_features, 16, symmetric)
        tensors |= packed
        linear.weight.data = weight
    tensors |= {"layers.1.bias": model.layers[1].bias.data, "lm_head.weight": model.lm_head.weight.data}
    write(tmp_path, tensors, llmcompressor_config(symmetric, 16))
    loaded = llm.load(tmp_path, Tiny())
    x = torch.randn(5, 64)
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-4)
    assert type(loaded.lm_head) is nn.Linear


def test_gptq_as_gptqmodel_says_it(tmp_path):
    """`meta` and keys that say nothing here, version 1 zero points, layers that "-:" leaves out of the packed ones."""
    torch.manual_seed(0)
    model = Tiny()
    first = model.layers[0]
    codes, scales = torch.randint(0, 16, (16, 64)), torch.rand(16, 4).half() + 0.01
    first.weight.data = (codes - 8) * scales.float().repeat_interleave(16, 1)
    tensors = {
        "layers.0.qweight": words_by_hand(codes).T.contiguous(),  # (words of inputs, outputs)
        "layers.0.qzeros": words_by_hand(torch.full((4, 16), 7)),
        "layers.0.scales": scales.T.contiguous(),
        "layers.0.g_idx": torch.arange(64, dtype=torch.int32) // 16,
    }
    rest = ("layers.1.weight", "layers.1.bias", "lm_head.weight")
    tensors |= {name: model.state_dict()[name] for name in rest}
    config = {
        "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "dynamic": {"-:^layers\\.1$": {}},
        "group_size": 16, "lm_head": False, "meta": {"quantizer": ["gptqmodel:7.6.0"], "damp_percent": 0.05},
        "method": "gptq", "pack_dtype": "int32", "quant_method": "gptq", "sym": True,
    }  # fmt: skip
    write(tmp_path, tensors, config)
    x = torch.randn(5, 64)
    torch.testing.assert_close(llm.load(tmp_path, Tiny())(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_layer_that_no_group_names_is_an_error(tmp_path):
    tensors, _ = layer("layers.0", 16, 64, 16, True)
    config = llmcompressor_config(True, 16)
    config["config_groups"]["group_0"]["targets"] = ["re:.*q_proj$"]
    write(tmp_path, tensors, config)
    with pytest.raises(ConfigError, match=r"layers\.0"):
        llm.load(tmp_path, Tiny())
