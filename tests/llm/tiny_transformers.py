"""Tiny models of transformers with random weights, one per architecture: what `llm` is tried on.

`ARCHITECTURES[name]()` builds one in milliseconds: the model, of the class that its config's `architectures` names,
and one batch of inputs. Every layer's inputs are a multiple of 32, but those of Mamba's dt_proj (4; in real ones 48).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Their classes look at `weight` while they are built; only since 5.23 does transformers unpack while it loads.
NOT_BEFORE_5_23 = {
    "FalconForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "MambaForCausalLM", "Mamba2ForCausalLM",
    "FalconMambaForCausalLM", "RwkvForCausalLM", "T5ForConditionalGeneration",
}  # fmt: skip
WORDS, IMAGE = 96, 90  # size of the vocabulary; the token that stands for a piece of an image
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {"num_key_value_heads": 4}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
GPT2 = {
    "vocab_size": WORDS,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SSM = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ = {
    "vocab_size": WORDS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


@dataclass(frozen=True)
class Architecture:
    """One row: `kind` says what is special about it, calling it builds it."""

    name: str
    kind: str  # dense, conv1d, moe, mla, ssm, encoder-decoder, vision-language
    config: dict[str, Any]
    head: str = "ForCausalLM"
    settings: str = ""  # the config's class, where it is not name + "Config"
    inputs: Callable[[], dict[str, Any]] | None = None

    @property
    def class_name(self) -> str:
        return self.name + self.head

    def __call__(self, **changes: Any) -> tuple[Any, dict[str, Any]]:
        """The model in eval mode, and a batch of keyword arguments."""
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        kind = getattr(transformers, self.settings or f"{self.name}Config")
        config = kind(**{**self.config, **changes})
        model = getattr(transformers, self.class_name)(config).eval()
        model.config.architectures = [self.class_name]
        return model, batch_of(self.class_name)


def is_refused(name: str) -> bool:
    """Whether the installed transformers runs no packed checkpoint of this class."""
    version = importlib.metadata.version("transformers")
    return name in NOT_BEFORE_5_23 and [int(part) for part in version.split(".")[:2]] < [5, 23]


def forced(name: str) -> dict[str, Any]:
    """For tests that are not about readers."""
    return {"force": True} if is_refused(name) else {}


def batch_of(name: str, seed: int = 2) -> dict[str, Any]:
    """Inputs of one architecture; another seed gives other ones."""
    inputs = ARCHITECTURES[name].inputs
    torch.manual_seed(seed)
    return {"input_ids": words()} if inputs is None else inputs()


def words(length: int = 24, before: int = 0) -> torch.Tensor:
    """Two sequences of words; the first `before` places are an image's."""
    ids = torch.randint(3, IMAGE - 2, (2, length))
    ids[:, :before] = IMAGE
    return ids


def translated() -> dict[str, Any]:
    return {"input_ids": words(), "decoder_input_ids": words(12)}


def spoken() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 16, 32), "decoder_input_ids": words(12)}


def shown(tokens: int) -> dict[str, Any]:
    """One image of 16 x 16 per sequence, which takes `tokens` places."""
    return {"input_ids": words(24, tokens), "pixel_values": torch.randn(2, 3, 16, 16)}


def shown_to_gemma3() -> dict[str, Any]:
    ids = words(24, 4)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(2, 3, 16, 16),
        "token_type_ids": (ids == IMAGE).long(),
    }


def shown_to_qwen() -> dict[str, Any]:
    """Two images of 2 x 2 patches, each merged to one token."""
    ids = words()
    ids[:, 1], ids[:, 2] = IMAGE + 2, IMAGE
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(2 * 4, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def shown_to_smolvlm() -> dict[str, Any]:
    return {"input_ids": words(24, 1), "pixel_values": torch.randn(2, 1, 3, 16, 16)}


def _rows() -> list[Architecture]:
    return [*_dense(), *_mixtures(), *_others(), *_encoder_decoders(), *_seeing()]


def _dense() -> list[Architecture]:
    def row(name: str, **config: Any) -> Architecture:
        return Architecture(name, "dense", {**SIZES, **config})

    bloom = {"vocab_size": WORDS, "hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 0}
    mpt = {
        "vocab_size": WORDS,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 64,
        "pad_token_id": 0,
    }
    return [
        row("Llama", tie_word_embeddings=True),
        row("Qwen2"),
        row("Qwen3", head_dim=16),
        row("Mistral", sliding_window=8),
        row("Gemma", head_dim=16),
        row("Gemma2", **GEMMA),
        Architecture("Gemma3", "dense", {**SIZES, **GEMMA}, settings="Gemma3TextConfig"),
        row("Phi", **WIDE),
        row("Phi3"),
        row("GPTNeoX"),
        Architecture("GPTJ", "dense", {**GPT2, "rotary_dim": 8}),
        row("OPT", ffn_dim=128, word_embed_proj_dim=64),
        Architecture("Bloom", "dense", bloom),
        Architecture("Mpt", "dense", mpt),
        row("Falcon", new_decoder_architecture=True, num_kv_heads=2),
        row("StableLm"),
        row("Olmo"),
        row("Olmo2"),
        row("Granite"),
        row("Cohere"),
        row("Starcoder2"),
        row("SmolLM3"),
        Architecture("GPT2", "conv1d", GPT2, head="LMHeadModel"),
        Architecture("GPTBigCode", "conv1d", GPT2),
    ]


def _mixtures() -> list[Architecture]:
    def row(name: str, kind: str = "moe", **config: Any) -> Architecture:
        return Architecture(name, kind, {**SIZES, **config})

    qwen = {**EXPERTS, "moe_intermediate_size": 64}
    linear = {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }
    return [
        row("Mixtral", num_local_experts=4, num_experts_per_tok=2),
        row("Qwen2Moe", **qwen, shared_expert_intermediate_size=64),
        row("Qwen3Moe", **qwen, head_dim=16),
        row("Qwen3Next", **qwen, **linear, shared_expert_intermediate_size=64, head_dim=16),
        row("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
        row("Olmoe", **EXPERTS),
        row("DeepseekV2", "mla", **MLA),
        row("DeepseekV3", "mla", **MLA),
    ]


def _others() -> list[Architecture]:
    def row(name: str, **config: Any) -> Architecture:
        return Architecture(name, "ssm", {**SSM, **config})

    return [
        row("Mamba"),
        row("Mamba2", num_heads=8, head_dim=16, n_groups=1, expand=2, chunk_size=8),
        row("FalconMamba"),
        row("Rwkv", attention_hidden_size=64, intermediate_size=128, context_length=64),
    ]


def _encoder_decoders() -> list[Architecture]:
    def row(
        name: str, config: dict[str, Any], inputs: Callable[[], dict[str, Any]] = translated
    ) -> Architecture:
        return Architecture(name, "encoder-decoder", config, "ForConditionalGeneration", inputs=inputs)

    t5 = {
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 16,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    whisper = {"num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32}
    return [
        row("T5", {"vocab_size": WORDS, **t5, "pad_token_id": 0, "eos_token_id": 2}),
        row("Bart", SEQ2SEQ),
        row("Pegasus", SEQ2SEQ),
        row("Whisper", {**SEQ2SEQ, **whisper}, spoken),
    ]


def _seeing() -> list[Architecture]:
    def row(name: str, config: dict[str, Any], inputs: Callable[[], dict[str, Any]]) -> Architecture:
        return Architecture(name, "vision-language", config, "ForConditionalGeneration", inputs=inputs)

    def of(text: str, vision: str, **config: Any) -> dict[str, Any]:
        return {
            "text_config": {**SIZES, "model_type": text},
            "vision_config": {**VISION, "model_type": vision},
            "image_token_id": IMAGE,
            **config,
        }

    llava = of("llama", "clip_vision_model", vision_feature_layer=-1, vision_feature_select_strategy="full")
    gemma3 = of("gemma3_text", "siglip_vision_model", mm_tokens_per_image=4)
    gemma3["text_config"].update(GEMMA)
    pali = of("gemma", "siglip_vision_model", projection_dim=64)
    pali["text_config"]["head_dim"] = 16
    pali["vision_config"]["projection_dim"] = 64
    qwen = of("qwen2_vl_text", "qwen2_vl", video_token_id=IMAGE + 1, vision_start_token_id=IMAGE + 2)
    qwen["vision_config"] = {"embed_dim": 64, "hidden_size": 64, "depth": 2, "num_heads": 4, "patch_size": 8}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    qwen["text_config"].update(rope_parameters=rope)
    return [
        row("Llava", llava, lambda: shown(5)),
        row("Qwen2VL", qwen, shown_to_qwen),
        row("Gemma3", gemma3, shown_to_gemma3),
        row("PaliGemma", pali, lambda: shown(4)),
        row("SmolVLM", of("llama", "smolvlm_vision", scale_factor=2, pad_token_id=0), shown_to_smolvlm),
    ]


ARCHITECTURES = {row.class_name: row for row in _rows()}
