"""transformers architectures from tiny configs: random weights, nothing is downloaded.

Width 64 and twelve tokens keep the ratio of the real models (768 and 128): attention products are 2-3 % of the MACs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from zoo_run import Case

TOKENS = 12
WIDTH = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
TEXT = {"vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0, **WIDTH}
LLM = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}
GPT = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
SEQ2SEQ = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
T5 = {
    "vocab_size": 128,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
}
IMAGE = {"image_size": 32, "patch_size": 8, **WIDTH}
STAGES = {"image_size": 64, "embed_dim": 48, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
SPEECH = {
    **TEXT,
    "conv_dim": [32, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
}
PYRAMID = {
    "image_size": 64,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 3, 4],
    "decoder_hidden_size": 32,
}
CLIP = {
    "text_config": {**TEXT, "eos_token_id": 2, "bos_token_id": 1},
    "vision_config": {**IMAGE},
    "projection_dim": 32,
}


# -- batches -------------------------------------------------------------------------------------------
def text() -> dict[str, Tensor]:
    """Two sentences, the second shorter: padding is part of the test."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, TOKENS - 3 :] = 0
    return {"input_ids": torch.randint(3, 128, (2, TOKENS)), "attention_mask": mask}


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 128, (2, TOKENS))}


def pair() -> dict[str, Tensor]:
    return {**text(), "decoder_input_ids": torch.randint(3, 128, (2, 8))}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def large_image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


def video() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32)}


def caption() -> dict[str, Tensor]:
    return {**text(), **image()}


def speech() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 210)}


def spectrum() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 16, 40)}


# -- models --------------------------------------------------------------------------------------------
def _from_config(kind: str, options: dict[str, Any], head: str, part: str) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **options)
    model: nn.Module = getattr(transformers, head).from_config(config)
    return model.get_submodule(part)


def case(
    kind: str,
    batch: Callable[[], Any],
    base: dict[str, Any],
    head: str = "AutoModel",
    part: str = "",
    **options: Any,
) -> Case:
    name = "-".join(n for n in (kind, head.removeprefix("AutoModel"), part) if n)
    return Case("transformers", name, lambda: _from_config(kind, {**base, **options}, head, part), batch)


ENCODERS = [
    case("bert", text, TEXT),
    case("bert", text, TEXT, "AutoModelForSequenceClassification"),
    case("roberta", text, TEXT),
    case("camembert", text, TEXT, "AutoModelForTokenClassification"),
    case("xlm-roberta", text, TEXT, "AutoModelForQuestionAnswering"),
    case("distilbert", text, {"vocab_size": 128, "dim": 64, "hidden_dim": 256, "n_layers": 2, "n_heads": 4}),
    case("albert", text, TEXT, embedding_size=32),
    case("electra", text, TEXT, embedding_size=32),
    case("deberta", text, TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    case("deberta-v2", text, TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    case("mpnet", text, TEXT),
    case("mobilebert", text, TEXT, embedding_size=32, intra_bottleneck_size=32, num_feedforward_networks=2),
    case("squeezebert", text, TEXT, embedding_size=64),
    case("modernbert", text, TEXT, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    case("nomic_bert", text, TEXT),
    case("ernie", text, TEXT),
    case("esm", text, TEXT, mask_token_id=1),
    case("fnet", tokens, TEXT),
    case("convbert", text, TEXT, embedding_size=32),
    case("layoutlm", text, TEXT),
    case("roformer", text, TEXT, embedding_size=32),
    case("t5", text, T5, part="encoder"),
    case("umt5", text, T5, part="encoder"),
]
DECODERS = [
    case("gpt2", text, GPT, "AutoModelForCausalLM"),
    case(
        "gpt_neo",
        text,
        TEXT,
        "AutoModelForCausalLM",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
    ),
    case("gpt_neox", text, TEXT, "AutoModelForCausalLM"),
    case("gptj", text, GPT, "AutoModelForCausalLM", rotary_dim=8),
    case("codegen", text, GPT, "AutoModelForCausalLM", rotary_dim=8),
    case("gpt_bigcode", text, GPT, "AutoModelForCausalLM"),
    case("opt", text, TEXT, "AutoModelForCausalLM", ffn_dim=256, word_embed_proj_dim=64),
    case(
        "bloom",
        text,
        {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "AutoModelForCausalLM",
    ),
    case("falcon", text, TEXT, "AutoModelForCausalLM"),
    case("mpt", text, {"vocab_size": 128, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    case("llama", text, LLM, "AutoModelForCausalLM"),
    case("mistral", text, LLM, "AutoModelForCausalLM"),
    case("mixtral", text, LLM, num_local_experts=4),
    case("qwen2", text, LLM, "AutoModelForCausalLM"),
    case("qwen3", text, LLM, "AutoModelForCausalLM"),
    case("gemma", text, LLM, "AutoModelForCausalLM"),
    case("gemma2", text, LLM),
    case("gemma3_text", text, LLM),
    case("phi", text, TEXT, "AutoModelForCausalLM"),
    case("phi3", text, LLM, "AutoModelForCausalLM"),
    case("stablelm", text, LLM),
    case("starcoder2", text, LLM),
    case("olmo2", text, LLM),
    case("cohere", text, LLM),
    case("granite", text, LLM),
    case("smollm3", text, LLM),
]
SEQUENCES = [
    case("t5", pair, T5),
    case("bart", pair, SEQ2SEQ),
    case("mbart", pair, SEQ2SEQ),
    case("pegasus", pair, SEQ2SEQ),
    case("m2m_100", pair, SEQ2SEQ),
    case("blenderbot", pair, SEQ2SEQ),
]
VISION = [
    case("vit", image, IMAGE),
    case("vit", image, IMAGE, "AutoModelForImageClassification"),
    case("deit", image, IMAGE),
    case("beit", image, IMAGE),
    case("data2vec-vision", image, IMAGE),
    case("dinov2", image, IMAGE),
    case("vit_msn", image, IMAGE),
    case("siglip_vision_model", image, IMAGE),
    case("clip_vision_model", image, IMAGE),
    case("swin", large_image, STAGES),
    case("swinv2", large_image, STAGES),
    case("convnext", large_image, {"hidden_sizes": [32, 64], "depths": [1, 2], "num_stages": 2}),
    case("convnextv2", large_image, {"hidden_sizes": [32, 64], "depths": [1, 2], "num_stages": 2}),
    case("resnet", large_image, {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 2]}),
    case(
        "regnet",
        large_image,
        {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 2], "groups_width": 16},
    ),
    case("mobilenet_v2", large_image, {"depth_multiplier": 0.35}),
    case(
        "mobilevit",
        large_image,
        {"image_size": 64, "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 16, 24, 32, 48, 64, 96]},
    ),
    case("poolformer", large_image, {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}),
    case(
        "pvt_v2",
        large_image,
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
        },
    ),
    case(
        "segformer",
        large_image,
        PYRAMID,
        "AutoModelForSemanticSegmentation",
    ),
    case(
        "dpt",
        large_image,
        {
            **IMAGE,
            "image_size": 64,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [16, 16, 32, 32],
            "fusion_hidden_size": 32,
            "is_hybrid": False,
        },
        "AutoModelForSemanticSegmentation",
    ),
    case(
        "glpn",
        large_image,
        PYRAMID,
    ),
    case("yolos", image, {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 4}),
    case("videomae", video, {**IMAGE, "num_frames": 4}),
    case("timesformer", video, {**IMAGE, "num_frames": 4}),
]
MULTIMODAL = [
    case("clip", caption, CLIP),
    case("siglip", lambda: {**tokens(), **image()}, {"text_config": TEXT, "vision_config": IMAGE}),
]
AUDIO = [
    case("whisper", spectrum, SEQ2SEQ, part="encoder", num_mel_bins=16, max_source_positions=20),
    case(
        "whisper",
        lambda: {**spectrum(), "decoder_input_ids": torch.randint(3, 128, (2, 8))},
        SEQ2SEQ,
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=32,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
    ),
    case("wav2vec2", speech, SPEECH),
    case("hubert", speech, SPEECH),
    case("wavlm", speech, SPEECH),
    case(
        "audio-spectrogram-transformer",
        lambda: {"input_values": torch.randn(2, 64, 32)},
        WIDTH,
        max_length=64,
        num_mel_bins=32,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
    ),
]
CASES = ENCODERS + DECODERS + SEQUENCES + VISION + MULTIMODAL + AUDIO
