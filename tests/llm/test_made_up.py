"""Without data a checkpoint is run on inputs that are made up: no folder is written that its reader has not run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from tiny_transformers import ARCHITECTURES, SEQ2SEQ, SIZES, VISION, WORDS

from sparsebit import llm
from sparsebit.errors import ReaderError

for package in ("transformers", "compressed_tensors", "accelerate"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install sparsebit[llm])", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
__import__("zoo_shim").install()  # before transformers looks for torchvision
transformers = importlib.import_module("transformers")
transformers.utils.logging.disable_progress_bar()
certificate = importlib.import_module("sparsebit.llm.checks.certificate")
made = importlib.import_module("sparsebit.llm.checks.made_up")

OPT = {
    "model_type": "opt", "vocab_size": WORDS, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 64,
}  # fmt: skip
QFORMER = {
    "vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "encoder_hidden_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
AUDIO = {
    "model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "d_model": 64, "max_source_positions": 16,
}  # fmt: skip


def blip2(T):
    parts = {"vision_config": VISION, "qformer_config": QFORMER, "text_config": OPT}
    config = T.Blip2Config(**parts, num_query_tokens=4, image_token_index=95)
    return T.Blip2ForConditionalGeneration(config)


def pix2struct(T):
    text = {"vocab_size": WORDS, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
    seeing = {
        "patch_embed_hidden_size": 192,
        "d_ff": 128,
        "d_kv": 16,
        "num_attention_heads": 4,
        "seq_len": 64,
    }
    both = {"hidden_size": 64, "num_hidden_layers": 2}
    config = T.Pix2StructConfig(text_config={**both, **text}, vision_config={**both, **seeing})
    return T.Pix2StructForConditionalGeneration(config)


def kosmos2(T):
    text = {"vocab_size": WORDS, "embed_dim": 64, "layers": 2, "ffn_dim": 128, "attention_heads": 4}
    config = T.Kosmos2Config(text_config=text, vision_config=VISION, latent_query_num=4)
    return T.Kosmos2ForConditionalGeneration(config)


def trocr(T):
    writer = T.TrOCRConfig(
        vocab_size=WORDS, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=128,
        max_position_embeddings=64, pad_token_id=0, decoder_start_token_id=2,
    )  # fmt: skip
    both = T.VisionEncoderDecoderConfig.from_encoder_decoder_configs(T.ViTConfig(**VISION), writer)
    return T.VisionEncoderDecoderModel(both)


def speech2text(T):
    sizes = {k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}
    heard = {"input_feat_per_channel": 16, "max_source_positions": 64, "max_target_positions": 64}
    config = T.Speech2TextConfig(**sizes, **heard, conv_channels=64)
    return T.Speech2TextForConditionalGeneration(config)


def qwen2audio(T):
    text = {**SIZES, "model_type": "qwen2"}
    config = T.Qwen2AudioConfig(text_config=text, audio_config=AUDIO, audio_token_index=90)
    return T.Qwen2AudioForConditionalGeneration(config)


BUILDERS = {f.__name__: f for f in (blip2, pix2struct, kosmos2, trocr, speech2text, qwen2audio)}
IN_THE_TABLE = (
    "WhisperForConditionalGeneration", "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration",
    "SmolVLMForConditionalGeneration", "T5ForConditionalGeneration",
)  # fmt: skip


def build(name):
    torch.manual_seed(0)
    model = ARCHITECTURES[name]()[0] if name in ARCHITECTURES else BUILDERS[name](transformers).eval()
    model.config.architectures = [type(model).__name__]
    return model


@pytest.mark.parametrize("name", [*BUILDERS, *IN_THE_TABLE])
def test_a_checkpoint_without_data_was_run(name, tmp_path, monkeypatch):
    """All packed layers, those of every tower too, and by the reader."""
    asked = []
    logits = certificate.READERS["transformers"].logits
    monkeypatch.setattr(
        certificate.READERS["transformers"], "logits", lambda *a: asked.append(a[2]) or logits(*a)
    )
    report = llm.quantize(build(name), method="rtn", towers="all", save=tmp_path)
    row = next(row for row in report.readers if row.reader == "transformers")
    assert row.state == "runs" and row.text.startswith("runs, logits") and "do not reach" not in row.text
    reached, loaded = set(), llm.load(tmp_path, dtype=torch.float32)
    for layer in report.layers:
        loaded.get_submodule(layer).register_forward_hook(lambda *_, layer=layer: reached.add(layer))
    with torch.no_grad():
        loaded(**asked[0])
    assert reached == set(report.layers)


def test_what_no_guess_fits_is_no_success(tmp_path, monkeypatch, caplog):
    """The command ends with exit code 1; with force the same words are a warning."""
    monkeypatch.setattr(made, "_candidates", lambda model: iter([{"input_ids": torch.full((1, 2), 10**6)}]))
    options = {"method": "rtn", "save": tmp_path / "a"}
    with pytest.raises(ReaderError, match=r"takes none of the inputs .* Give batches \(--data\)"):
        llm.quantize(build("LlamaForCausalLM"), **options)
    assert "**Not certified.** transformers" in (tmp_path / "a/README.md").read_text()
    llm.quantize(build("LlamaForCausalLM"), **{**options, "save": tmp_path / "b"}, force=True)
    assert "takes none of the inputs" in caplog.text


def test_what_no_guess_reaches_is_named(tmp_path, monkeypatch):
    words = {"input_ids": torch.arange(3, 19)[None]}
    monkeypatch.setattr(made, "_candidates", lambda model: iter([words]))
    model = build("LlavaForConditionalGeneration")
    report = llm.quantize(model, method="rtn", towers="all", save=tmp_path)
    row = next(row for row in report.readers if row.reader == "transformers")
    assert row.text == (
        "runs, logits equal; the inputs that were made up do not reach "
        "model.vision_tower.encoder.layers.0.self_attn.k_proj"
    )


def test_one_tensor_under_two_names_reaches_the_reader(tmp_path):
    """safetensors does not write a tensor twice."""
    model, _ = ARCHITECTURES["BartForConditionalGeneration"]()
    ids = torch.arange(3, 35).view(2, 16)
    batch = {"input_ids": ids, "decoder_input_ids": ids}
    report = llm.quantize(model, [batch], method="rtn", save=tmp_path)
    assert next(row for row in report.readers if row.reader == "transformers").state == "runs"
