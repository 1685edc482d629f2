"""Where llama.cpp wants a tensor in another order, shape or name: functions of a name and an item."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsebit.llm.gguf.hyperparameters import falcon_shared
from sparsebit.llm.gguf.items import Item

Named = list[tuple[str, Item]]


def pair_heads(name: str, item: Item, config: Any) -> Named:
    """Rows of q and k: llama.cpp's rotary positions turn neighbours, transformers' the halves of a head."""
    leaf = name.split(".")[-2] if "." in name else ""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(leaf)
    return [(name, item if heads is None else item.rows(paired(heads, item.rows_count() // heads)))]


def paired(heads: int, size: int) -> Tensor:
    return torch.arange(heads * size).view(heads, 2, size // 2).transpose(1, 2).reshape(-1)


def norms_plus_one(name: str, item: Item, config: Any) -> Named:
    """Gemma's and Nemotron's norms multiply by 1 + weight."""
    plus = name.endswith(("norm.weight", "layernorm.weight"))
    return [(name, item.map(lambda w: w.float() + 1) if plus else item)]


def q_k_v_apart(name: str, item: Item, config: Any) -> Named:
    """GPT-NeoX and BLOOM: q, k and v of each head in turn become all of q, of k, of v."""
    if ".query_key_value." not in name:
        return [(name, item)]
    heads = config.num_attention_heads
    order = torch.arange(item.rows_count()).view(heads, 3, -1).transpose(0, 1).reshape(-1)
    return [(name, item.rows(order))]


def bloom_names(name: str, item: Item, config: Any) -> Named:
    return [(name.removeprefix("transformer."), item)]


def falcon_apart(name: str, item: Item, config: Any) -> Named:
    """Falcon: the queries that share a key, the key and the value, group by group."""
    if ".query_key_value." not in name:
        return [(name, item)]
    shared = falcon_shared(config)
    rows = torch.arange(item.rows_count()).view(shared, config.num_attention_heads // shared + 2, -1)
    order = torch.cat([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])
    return [(name, item.rows(order))]


def gate_and_up(name: str, item: Item, config: Any) -> Named:
    """Experts: the fused weight of gate and up as two, under one name for all experts."""
    name = name.replace(".block_sparse_moe.experts.", ".mlp.experts.")
    name = name.replace(".block_sparse_moe.router.", ".mlp.gate.")
    if name.endswith(("experts.gate_proj", "experts.up_proj", "experts.down_proj")):
        return [(f"{name}.weight", item)]
    if not name.endswith("experts.gate_up_proj"):
        return [(name, item)]
    owner = name.removesuffix("gate_up_proj")
    half = item.rows_count() // 2
    gate = torch.arange(half)
    up = torch.arange(half, 2 * half)
    return [(f"{owner}gate_proj.weight", item.rows(gate)), (f"{owner}up_proj.weight", item.rows(up))]


def shared_gate(name: str, item: Item, config: Any) -> Named:
    """The gate of a shared expert is a vector."""
    flat = name.endswith("shared_expert_gate.weight")
    return [(name, item.map(lambda w: w.reshape(-1), (item.shape[-1],)) if flat else item)]


def state_space(name: str, item: Item, config: Any) -> Named:
    """Mamba: minus exp of A_log, a convolution without its middle axis; Mamba-2 keeps columns and groups."""
    two = config.model_type == "mamba2"
    column = (item.shape[0], 1)
    if name.endswith(".A_log"):
        shape = column if two else item.shape
        return [(name, item.map(lambda a: -torch.exp(a.float()).reshape(shape), shape))]
    if name.endswith(".conv1d.weight"):
        return [(name, item.map(lambda w: w.squeeze(1), (item.shape[0], item.shape[2])))]
    if two and name.endswith(".D"):
        return [(name, item.map(lambda d: d.reshape(column), column))]
    if two and name.endswith(".mixer.norm.weight"):
        groups = (config.n_groups, item.shape[0] // config.n_groups)
        return [(name, item.map(lambda w: w.reshape(groups), groups))]
    return [(name.replace(".dt_bias", ".dt_proj.bias") if two else name, item)]
