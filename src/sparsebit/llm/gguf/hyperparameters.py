"""The values of a config under llama.cpp's keys, and values that are refused because llama.cpp computes differently."""

from __future__ import annotations

from typing import Any

from sparsebit.errors import ExportError
from sparsebit.llm.gguf.rope import rope_keys

GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")


# -- keys ------------------------------------------------------------------------------------------------
def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def sizes(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {
        "context_length": context(config),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": inner_size(config),
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "attention.key_length": head_size(config),
        "attention.value_length": head_size(config),
        "vocab_size": config.vocab_size,
    }


def context(config: Any) -> int:
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 2048  # BLOOM has no such key; its positions have no limit


def inner_size(config: Any) -> int:
    for name in ("ffn_hidden_size", "intermediate_size", "n_inner", "ffn_dim"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return int(getattr(config, "expansion_ratio", 4)) * int(config.hidden_size)


def rope(config: Any) -> dict[str, Any]:
    return rope_keys(config, head_size(config))


def rms(config: Any) -> dict[str, Any]:
    for name in ("rms_norm_eps", "layer_norm_epsilon"):
        if getattr(config, name, None) is not None:
            return {"attention.layer_norm_rms_epsilon": float(getattr(config, name))}
    return {"attention.layer_norm_rms_epsilon": 1e-6}


def layer_norm(config: Any) -> dict[str, Any]:
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if getattr(config, name, None) is not None:
            return {"attention.layer_norm_epsilon": float(getattr(config, name))}
    return {"attention.layer_norm_epsilon": 1e-5}


def one_head_each(config: Any) -> dict[str, Any]:
    """No heads are shared, even if another key of the config differs."""
    return {"attention.head_count_kv": config.num_attention_heads}


def falcon_heads(config: Any) -> dict[str, Any]:
    return {"attention.head_count_kv": falcon_shared(config)}


def falcon_shared(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    if config.multi_query:
        return 1
    return int(config.num_attention_heads)


def bigcode_heads(config: Any) -> dict[str, Any]:
    return {"attention.head_count_kv": 1 if config.multi_query else config.num_attention_heads}


def windows(config: Any) -> dict[str, Any]:
    """Which layers see a window only."""
    if "sliding_attention" not in layer_kinds(config):
        return {}
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [k == "sliding_attention" for k in layer_kinds(config)],
    }


def soft_caps(config: Any) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": _number(config, "attn_logit_softcapping"),
        "final_logit_softcapping": _number(config, "final_logit_softcapping"),
    }


def granite_scales(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": _number(config, "attention_multiplier"),
        "embedding_scale": _number(config, "embedding_multiplier"),
        "residual_scale": _number(config, "residual_multiplier"),
        "logit_scale": _number(config, "logits_scaling"),
    }


def logit_scale(config: Any) -> dict[str, Any]:
    return {"logit_scale": _number(config, "logit_scale")}


def clamp(config: Any) -> dict[str, Any]:
    return {"attention.clamp_kqv": _number(config, "clip_qkv")}


def parallel(config: Any) -> dict[str, Any]:
    return {"use_parallel_residual": bool(config.use_parallel_residual)}


def alibi(config: Any) -> dict[str, Any]:
    return {
        "attention.max_alibi_bias": float(config.attn_config.alibi_bias_max),
        "attention.clamp_kqv": _number(config.attn_config, "clip_qkv"),
    }


def experts(config: Any) -> dict[str, Any]:
    count = getattr(config, "num_local_experts", None) or config.num_experts
    alone = getattr(config, "moe_intermediate_size", None)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return {
        "expert_count": count,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": alone,
        "expert_shared_feed_forward_length": shared or None,
    }


def state_space(config: Any) -> dict[str, Any]:
    two = config.model_type == "mamba2"
    return {
        "context_length": 2**20,  # there is no limit
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "vocab_size": config.vocab_size,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": int(config.expand * config.hidden_size),
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.num_heads if two else config.time_step_rank,
        "ssm.group_count": config.n_groups if two else None,
        "ssm.dt_b_c_rms": True if config.model_type == "falcon_mamba" else None,
    }


def layer_kinds(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return None if value is None else float(value)


# -- checks ----------------------------------------------------------------------------------------------
def refuse(config: Any, said: str, taken: str) -> None:
    raise ExportError(f"gguf: {said}, but llama.cpp's {config.model_type} {taken}; it cannot be written")


def activation(config: Any, known: tuple[str, ...]) -> None:
    """llama.cpp takes the activation from the architecture, not from the file."""
    found = next((getattr(config, n) for n in ACTIVATIONS if getattr(config, n, None)), known[0])
    if found not in known:
        refuse(config, f"the activation is {found!r}", f"has {known[0]!r}")


def no_windows(config: Any) -> list[str]:
    """llama.cpp lets every layer see everything: the same, as long as the window is not full."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        used = getattr(config, "use_sliding_window", True)
    else:
        used = "sliding_attention" in kinds
    if not window or not used or window >= context(config):
        return []
    return [f"llama.cpp has no sliding window here: texts of more than {window} tokens are run otherwise"]


def query_scale(config: Any) -> list[str]:
    """llama.cpp computes the scale of Gemma's attention from the sizes."""
    large = config.num_hidden_layers == {"gemma2": 46, "gemma3_text": 62}[config.model_type]
    if large:
        wanted = config.hidden_size // config.num_attention_heads
    else:
        wanted = head_size(config)
    if float(config.query_pre_attn_scalar) != float(wanted):
        refuse(
            config, f"query_pre_attn_scalar is {config.query_pre_attn_scalar}", f"of this size has {wanted}"
        )
    return []


def expects(**wanted: Any) -> Any:
    """A check that settings, where they are there, are what llama.cpp has built in."""

    def check(config: Any) -> list[str]:
        for name, value in wanted.items():
            if getattr(config, name, value) != value:
                refuse(config, f"{name} is {getattr(config, name)}", f"has {value}")
        return []

    return check


def every_fourth_without_rope(config: Any) -> list[str]:
    wanted = [int((i + 1) % 4 != 0) for i in range(config.num_hidden_layers)]
    if list(config.no_rope_layers) != wanted:
        refuse(config, "no_rope_layers is another list", "turns all but every fourth layer")
    return []


def windows_where_built_in(config: Any) -> list[str]:
    """EXAONE 4: llama.cpp knows windows in the model of 64 layers only; with them, the other layers are not turned."""
    if config.num_hidden_layers != 64 and config.sliding_window:
        refuse(config, f"sliding_window is {config.sliding_window}", "has one with 64 layers only")
    return []


def no_shared_heads(config: Any) -> list[str]:
    if config.num_key_value_heads != config.num_attention_heads:
        refuse(config, f"num_key_value_heads is {config.num_key_value_heads}", "shares no heads")
    return []
