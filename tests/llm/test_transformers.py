"""Models of transformers, built with random weights: found, quantized, reloaded, read by others.

Skipped where transformers is missing; the plain-torch models of the other files cover the machinery there.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_transformers import forced

from sparsebit import llm
from sparsebit.errors import ConfigError

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (pip install sparsebit[llm])", allow_module_level=True)

ZOO = Path(__file__).resolve().parents[1] / "zoo"
sys.path.insert(0, str(ZOO))
__import__("zoo_shim").install()  # before transformers looks for torchvision
transformers = importlib.import_module("transformers")
AutoModelForCausalLM = transformers.AutoModelForCausalLM

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},  # biases on q, k, v
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 8},  # blocks with different masks
    "Phi3": {},  # fused qkv and gate_up
    "GPTNeoX": {},  # fused qkv, parallel residual
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Mistral": {"sliding_window": 8},
}


def build(kind: str, **changes) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind], **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def tokens(n=2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 96, (2, 24), generator=generator) for _ in range(n)]


@pytest.mark.parametrize("kind", KINDS)
def test_quantize_and_reload(kind, tmp_path):
    model = build(kind)
    report = llm.quantize(model, tokens(), save=tmp_path, bits=8, group_size=32)
    assert len(report.layout) == 2 and len(report.layers) >= 8
    assert max(about["error"] for about in report.layers.values()) < 1e-3
    loaded = llm.load(tmp_path)
    with torch.no_grad():
        out, expected = loaded(tokens()[0]).logits, model(tokens()[0]).logits
        torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05 * float(expected.std()))
        again = loaded.generate(tokens()[0][:, :4], max_new_tokens=4, do_sample=False)
    assert again.shape == (2, 8)


def test_a_folder_gives_the_same_bytes_as_the_model(tmp_path):
    """Weights read block by block, from shards."""
    model = build("Llama")
    model.save_pretrained(tmp_path / "float", max_shard_size="60KB")
    assert len(list((tmp_path / "float").glob("*.safetensors"))) > 2
    llm.quantize(model, tokens(), save=tmp_path / "a", group_size=32)
    llm.quantize(tmp_path / "float", tokens(), save=tmp_path / "b", group_size=32)
    for path in sorted((tmp_path / "a").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_bfloat16_stays_bfloat16(tmp_path):
    model = build("Qwen2").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "float")
    llm.quantize(tmp_path / "float", tokens(), save=tmp_path / "out", bits=8, group_size=32)
    loaded = llm.load(tmp_path / "out")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    layer = loaded.model.layers[0].self_attn.q_proj
    assert layer.scales.dtype == layer.bias.dtype == layer.weight.dtype == torch.bfloat16
    out, expected = loaded(tokens()[0]).logits.float(), model(tokens()[0]).logits.float()
    assert (out - expected).abs().max() < 0.1 * expected.abs().max()


def test_a_folder_is_never_in_memory_as_a_whole(tmp_path):
    from sparsebit.llm.models.sources import OnDisk

    build("Llama").save_pretrained(tmp_path)
    source = OnDisk(tmp_path)
    assert all(p.is_meta for p in source.blocks.parameters())
    assert not any(p.is_meta for p in source.block(1).parameters())
    assert all(p.is_meta for p in source.blocks.parameters())
    assert source.model.lm_head.weight is source.model.model.embed_tokens.weight


def test_a_folder_with_other_names_says_what_to_do(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    state = load_file(tmp_path / "model.safetensors")
    state["other"] = state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj.weight'; load it with transformers"):
        llm.quantize(tmp_path, tokens(), save=tmp_path / "out", group_size=32)


@pytest.mark.parametrize("options", [
    {"bits": 4}, {"bits": 3, "symmetric": False}, {"bits": 2, "group_size": -1},
    {"candidate_bits": (2, 4), "average_bits": 3.0},
])  # fmt: skip
def test_transformers_loads_it_through_compressed_tensors(options, tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to load quantized models")
    model = build("Llama")
    model.save_pretrained(tmp_path / "float")
    llm.quantize(tmp_path / "float", tokens(), save=tmp_path / "out", **{"group_size": 32, **options})
    ours = llm.load(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        a, b = ours(tokens()[0]).logits, theirs(tokens()[0]).logits
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert (a - model(tokens()[0]).logits).abs().max() > 1e-3  # it is the quantized model that was compared


def test_config_and_tokenizer_files_go_along(tmp_path):
    build("Llama").save_pretrained(tmp_path / "float")
    (tmp_path / "float" / "tokenizer.json").write_text("{}")
    llm.quantize(tmp_path / "float", save=tmp_path / "out", method="rtn", group_size=32, format="gptq")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["quantization_config"]["quant_method"] == "gptq"
    assert (tmp_path / "out" / "tokenizer.json").is_file() and (
        tmp_path / "out" / "generation_config.json"
    ).is_file()


@pytest.mark.slow
def test_peak_memory_of_four_times_the_layers(tmp_path):
    """At most 10 % more, in fresh processes on folders: one block is in memory, not the model."""
    import os
    import subprocess

    peaks = []
    for layers in (2, 8):
        folder = tmp_path / str(layers)
        build("Llama", num_hidden_layers=layers, hidden_size=512, intermediate_size=1024).save_pretrained(
            folder
        )
        code = (
            "import sys, resource; sys.path.insert(0, sys.argv[2])\n"
            "import zoo_shim; zoo_shim.install()\n"
            "import torch; torch.set_num_threads(1)\n"
            "from sparsebit import llm\n"
            "llm.quantize(sys.argv[1], [torch.randint(3, 96, (6, 24))], save=sys.argv[1] + '-out', group_size=32,"
            " refine=0)\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        command = [sys.executable, "-c", code, str(folder), str(ZOO)]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == 0, done.stderr[-2000:]
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] < 1.1 * peaks[0], peaks


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize(
    "options",
    [
        {"method": "smoothquant"},
        {"method": "awq", "group_size": 32},
        {"method": "hqq", "group_size": 32, "rotate": True},
        {"method": "sparsegpt", "pattern": (2, 4)},
    ],
)
def test_transformers_loads_the_other_methods(kind, options, tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to load quantized models")
    model = build(kind)
    model.save_pretrained(tmp_path / "float")
    llm.quantize(tmp_path / "float", tokens(), save=tmp_path / "out", **options)
    ours = llm.load(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        a, b, c = (m(tokens()[0]).logits for m in (ours, theirs, model))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert 1e-3 < (a - c).abs().max() < 0.5 * c.abs().max()


FEEDERS = {
    "Llama": {"self_attn.o_proj": "self_attn.v_proj", "mlp.down_proj": "mlp.up_proj"},
    "Gemma2": {"self_attn.q_proj": "input_layernorm", "mlp.up_proj": "pre_feedforward_layernorm"},
    "Phi3": {"self_attn.o_proj": "self_attn.qkv_proj", "mlp.down_proj": "mlp.gate_up_proj"},
    "GPTNeoX": {"attention.dense": "attention.query_key_value", "mlp.dense_4h_to_h": None},
    "OPT": {"fc2": "fc1", "fc1": "final_layer_norm"},
}


@pytest.mark.parametrize("kind", FEEDERS)
def test_scales_find_their_place(kind, tmp_path):
    report = llm.quantize(build(kind), tokens(), save=tmp_path, method="awq", bits=8, group_size=32)
    first = report.layout.prefix(0)
    for name, place in FEEDERS[kind].items():
        assert report.layers[first + name].get("scales_in") == (place and first + place)


def trained(kind: str) -> torch.nn.Module:
    """With gains that are not 1."""
    model = build(kind)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.uniform_(0.5, 2.0)
    return model


def test_rotated_architectures(tmp_path):
    for kind in ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3"):
        model = trained(kind)
        llm.quantize(model, tokens(), save=tmp_path / kind, bits=8, group_size=32, rotate=True)
        with torch.no_grad():
            a, b = llm.load(tmp_path / kind)(tokens()[0]).logits, model(tokens()[0]).logits
        assert (a - b).abs().max() < 0.05 * b.abs().max()
    for kind, why in {
        "Gemma2": "returns a different output",
        "OPT": "LayerNorm",
        "GPTNeoX": "LayerNorm",
    }.items():
        with pytest.raises(ConfigError, match=why):
            llm.quantize(trained(kind), tokens(), save=tmp_path / kind, group_size=32, rotate=True)


# -- weights that are in no Linear ---------------------------------------------------------------------------------
UNUSUAL = {
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def unusual(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **UNUSUAL[kind]})
    model = AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.mul_(3)  # so that layers change what flows past them
    return model


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "sparsegpt"])
def test_weights_that_are_in_no_linear(kind, method, tmp_path):
    model, batches = unusual(kind), tokens(4)
    options = {"ratio": 0.3} if method == "sparsegpt" else {"group_size": 32}
    options |= forced(type(model).__name__)
    report = llm.quantize(model, batches, save=tmp_path, method=method, **options)
    if kind == "GPT2":
        assert "8 Conv1D are stored as Linear" in str(report.layout) and len(report.layers) == 8
    else:
        assert "4 tensors of stacked experts" in str(report.layout)
        first = report.layout.prefix(0)
        names = [n for n in report.layers if n.startswith(first) and "experts" in n]
        assert len(names) == 12  # gate, up and down of four experts
        if method != "hqq":
            assert all(
                "error" in report.layers[n] or "no calibration token" in report.layers[n]["note"]
                for n in names
            )
    assert not any("experts" in name or "c_attn" in name for name, _ in report.layout.kept)
    loaded = llm.load(tmp_path)
    with torch.no_grad():
        ours, expected = loaded(batches[0]).logits, model(batches[0]).logits
    share = float((ours - expected).square().mean() / expected.square().mean())
    assert 0 < share < (0.3 if method == "sparsegpt" else 0.1)
    out = loaded.generate(batches[0][:1, :8], max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 12)


def test_experts_are_measured_on_their_own_tokens(tmp_path):
    """8 bits of stacked experts are the float model; each expert's error is its own."""
    model = unusual("Mixtral")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    report = llm.quantize(model, tokens(4), save=tmp_path, bits=8, group_size=32)
    with torch.no_grad():
        ours, expected = llm.load(tmp_path)(tokens()[0]).logits, model(tokens()[0]).logits
    assert (ours - expected).abs().max() < 0.02 * expected.abs().max()
    errors = {a["error"] for n, a in report.layers.items() if n.endswith(".w1") and "error" in a}
    assert len(errors) > 2
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
