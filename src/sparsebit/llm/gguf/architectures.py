"""What llama.cpp wants to know about each architecture: its name for it, hyperparameters, how tensors are laid out.

Each row was proven with llama.cpp itself: a small random model gives the logits of transformers
(tests/llm/test_llama_cpp.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparsebit.errors import ExportError
from sparsebit.llm.gguf import hyperparameters as keys
from sparsebit.llm.gguf import layouts
from sparsebit.llm.gguf.hyperparameters import GELU
from sparsebit.llm.gguf.items import Item
from sparsebit.llm.gguf.layouts import Named


@dataclass(frozen=True)
class Architecture:
    """One row.

    name      what llama.cpp calls it
    keys      functions of the config that give keys; later ones win
    layouts   functions that give other names, orders or shapes to tensors; each sees what the one before left
    checks    refuse a config that llama.cpp would run otherwise, and return notes
    act       the activations that are built in, or near enough
    own_head  whether llama.cpp wants a head even where it is tied to the embeddings
    """

    name: str
    keys: tuple[Callable[[Any], dict[str, Any]], ...]
    layouts: tuple[Callable[[str, Item, Any], Named], ...] = ()
    checks: tuple[Callable[[Any], list[str]], ...] = ()
    act: tuple[str, ...] = ("silu",)
    own_head: bool = False

    def metadata(self, config: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in self.keys:
            found |= part(config)
        return {f"{self.name}.{key}": value for key, value in found.items() if value is not None}

    def notes(self, config: Any) -> list[str]:
        keys.activation(config, self.act)
        self.metadata(config)  # refuses positions that cannot be written
        found: list[str] = []
        for check in self.checks:
            found.extend(check(config))
        return found

    def rewrite(self, name: str, item: Item, config: Any) -> Named:
        found = [(name, item)]
        for step in self.layouts:
            found = [new for old, value in found for new in step(old, value, config)]
        return found


RMS = (keys.sizes, keys.rope, keys.rms)
NORM = (keys.sizes, keys.rope, keys.layer_norm)
MOE = (*RMS, keys.experts)
PAIRED = (layouts.pair_heads,)
PLUS = (layouts.norms_plus_one,)
STACKED = (layouts.gate_and_up, layouts.shared_gate)
WIDE = (keys.no_windows,)
EVERY = keys.expects(decoder_sparse_step=1, mlp_only_layers=[])
LLAMA = Architecture("llama", RMS, PAIRED, WIDE)
TABLE: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "mixtral": Architecture("llama", MOE, (*PAIRED, *STACKED), WIDE),
    "arcee": Architecture("arcee", RMS, PAIRED, act=("relu2",)),
    "smollm3": Architecture("smollm3", RMS, PAIRED, (keys.every_fourth_without_rope, *WIDE)),
    "granite": Architecture("granite", (*RMS, keys.granite_scales), PAIRED),
    "granitemoe": Architecture("granitemoe", (*MOE, keys.granite_scales), (*PAIRED, *STACKED)),
    "olmo": Architecture("olmo", (*NORM, keys.clamp), PAIRED),
    "olmo2": Architecture("olmo2", RMS),
    "olmo3": Architecture("olmo2", (*RMS, keys.windows)),
    "olmoe": Architecture(
        "olmoe",
        MOE,
        STACKED,
        (keys.expects(norm_topk_prob=False, clip_qkv=None), keys.no_shared_heads),
        own_head=True,
    ),
    "qwen2": Architecture("qwen2", RMS, (), WIDE),
    "qwen2_moe": Architecture(
        "qwen2moe", MOE, STACKED, (keys.expects(norm_topk_prob=False), EVERY, *WIDE), own_head=True
    ),
    "qwen3": Architecture("qwen3", RMS, (), WIDE),
    "qwen3_moe": Architecture("qwen3moe", MOE, STACKED, (keys.expects(norm_topk_prob=True), EVERY, *WIDE)),
    "seed_oss": Architecture("seed_oss", RMS),
    "gemma": Architecture("gemma", RMS, PLUS, act=GELU),
    "gemma2": Architecture("gemma2", (*RMS, keys.windows, keys.soft_caps), PLUS, (keys.query_scale,), GELU),
    "gemma3_text": Architecture(
        "gemma3", (*RMS, keys.windows, keys.soft_caps), PLUS, (keys.query_scale,), GELU
    ),
    "phi": Architecture("phi2", (*NORM, keys.one_head_each), act=GELU, own_head=True),
    "phi3": Architecture("phi3", RMS, (), WIDE),
    "cohere": Architecture("command-r", (*NORM, keys.logit_scale), (), (keys.expects(use_qk_norm=False),)),
    "cohere2": Architecture("cohere2", (*NORM, keys.windows, keys.logit_scale)),
    "glm4": Architecture("glm4", RMS),
    "ernie4_5": Architecture("ernie4_5", RMS),
    "exaone4": Architecture("exaone4", (*RMS, keys.windows), (), (keys.windows_where_built_in,)),
    "nemotron": Architecture("nemotron", NORM, PLUS, act=("relu2",), own_head=True),
    "stablelm": Architecture("stablelm", (*NORM, keys.parallel), own_head=True),
    "starcoder2": Architecture("starcoder2", NORM, (), (keys.expects(use_bias=True), *WIDE), GELU),
    "gpt2": Architecture("gpt2", (keys.sizes, keys.layer_norm), act=GELU),
    "gpt_bigcode": Architecture("starcoder", (keys.sizes, keys.layer_norm, keys.bigcode_heads), act=GELU),
    "gpt_neox": Architecture(
        "gptneox",
        (*NORM, keys.one_head_each, keys.parallel),
        (layouts.q_k_v_apart,),
        (keys.expects(attention_bias=True),),
        GELU,
        own_head=True,
    ),
    "bloom": Architecture(
        "bloom",
        (keys.sizes, keys.layer_norm, keys.one_head_each),
        (layouts.q_k_v_apart, layouts.bloom_names),
        (keys.expects(apply_residual_connection_post_layernorm=False),),
        GELU,
    ),
    "mpt": Architecture("mpt", (keys.sizes, keys.layer_norm, keys.one_head_each, keys.alibi), (), (), GELU),
    "falcon": Architecture(
        "falcon",
        (*NORM, keys.falcon_heads),
        (layouts.falcon_apart,),
        (keys.expects(alibi=False, parallel_attn=True, bias=False),),
        GELU,
    ),
    "mamba": Architecture("mamba", (keys.state_space, keys.rms), (layouts.state_space,)),
    "mamba2": Architecture("mamba2", (keys.state_space, keys.rms), (layouts.state_space,)),
    "falcon_mamba": Architecture("mamba", (keys.state_space, keys.rms), (layouts.state_space,)),
}


def architecture_of(config: Any) -> Architecture:
    kind = getattr(config, "model_type", None)
    if kind not in TABLE:
        raise ExportError(f"gguf: {kind} models cannot be written; there are: {', '.join(sorted(TABLE))}")
    return TABLE[kind]
