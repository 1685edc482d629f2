"""GGUF files: codes as they were solved, metadata that llama.cpp wants, tokenizers that cut text as transformers' do.

What the files say is read with gguf's own reader and compared with what is written here by hand. The tests in
test_llama_cpp.py run the files.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsebit import llm
from sparsebit.errors import ConfigError, ExportError, ReaderError
from sparsebit.llm.gguf import GgufReport, certificate, export_gguf, pack, to_gguf
from sparsebit.llm.gguf.packing import fit
from sparsebit.numeric.quantized_weight import QuantizedWeight
from sparsebit.numeric.solvers.rtn import rtn
from sparsebit.numeric.spec import QuantSpec

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (pip install sparsebit[llm])", allow_module_level=True)
gguf = pytest.importorskip("gguf", reason="gguf is not installed (pip install gguf)")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "zoo")]
__import__("zoo_shim").install()
files = importlib.import_module("gguf_files")
ARCHITECTURES = importlib.import_module("tiny_transformers").ARCHITECTURES


def read(path: Path) -> tuple[dict, dict]:
    """Keys and tensors, as gguf's reader sees them."""
    reader = gguf.GGUFReader(str(path))
    return {k: f.contents() for k, f in reader.fields.items()}, {t.name: t for t in reader.tensors}


def build(name: str, **changes):
    return ARCHITECTURES[name](**changes)[0]


# -- blocks ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 64), (4, 32), (4, 64), (8, 32), (8, None)])
def test_symmetric_blocks_are_what_the_format_says(bits, group):
    """Read by hand: a float16, then the integers."""
    q = rtn(torch.randn(5, 64), None, QuantSpec(bits, True, 0, group=group), scale_dtype=torch.float16)
    q.codes[0, :2] = torch.tensor([0, 2**bits - 1], dtype=torch.uint8)
    rows = pack(q)
    size = 34 if bits == 8 else 18
    assert rows.shape == (5, 2 * size) and rows.dtype == np.uint8
    back = torch.empty(5, 64)
    for r, row in enumerate(rows):
        for b in range(2):
            block = row[b * size : (b + 1) * size].tobytes()
            scale = float(np.frombuffer(block[:2], np.float16)[0])
            for i in range(32):
                level = int.from_bytes(block[2 + i : 3 + i], "little", signed=True) if bits == 8 else (
                    block[2 + i % 16] >> (4 * (i // 16))
                ) % 16 - 8  # fmt: skip
                back[r, 32 * b + i] = scale * level
    assert torch.equal(back, q.dequantize()) and fit(q).change == "exact"


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_zero_points_become_offsets(bits):
    """Scales of few digits: then float16 holds scale times zero point, and gguf's own reader gives our weights."""
    weight = torch.randn(6, 64)
    q = rtn(weight, None, QuantSpec(bits, False, 0, group=32))
    q = QuantizedWeight(q.codes, 2.0 ** q.scales.log2().round(), q.zeros, bits, False, 32)
    assert fit(q).kind == "Q4_1" and fit(q).change == "exact"
    back = gguf.dequantize(pack(q), gguf.GGMLQuantizationType.Q4_1)
    assert np.array_equal(back, q.dequantize().numpy())


def test_a_grid_that_float16_does_not_hold_is_rounded_and_said():
    q = rtn(torch.randn(6, 64), None, QuantSpec(4, False, 0, group=32))
    assert fit(q).change == "grid rounded to float16"
    back = torch.from_numpy(gguf.dequantize(pack(q), gguf.GGMLQuantizationType.Q4_1))
    step = q.scales.repeat_interleave(32, 1)
    assert ((back - q.dequantize()).abs() < 0.02 * step).all()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"bits": 8, "symmetric": False, "group": 32}, "8 bits with a zero point"),
        ({"bits": 4, "symmetric": True, "group": 16}, "groups of 16 inputs"),
        ({"bits": 4, "symmetric": True, "group": None, "inputs": 48}, "48 inputs"),
    ],
)
def test_what_no_block_holds_is_refused_by_pack(change, why):
    spec = QuantSpec(change["bits"], change["symmetric"], 0, group=change["group"])
    with pytest.raises(ExportError, match=why):
        pack(rtn(torch.randn(4, change.get("inputs", 64)), None, spec))


# -- whole models ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("bits", [4, 8])
def test_transformers_reads_a_packed_model(tmp_path, name, bits):
    model = build(name)
    llm.quantize(model, save=tmp_path / "out", method="rtn", bits=bits, group_size=32)
    tokenizer = files.byte_level()
    loaded = llm.load(tmp_path / "out")
    report = to_gguf(loaded, tmp_path / "model.gguf", tokenizer=_saved(tokenizer, tmp_path / "tokens"))
    tensors = read(tmp_path / "model.gguf")[1]
    found = tensors["blk.1.ffn_down.weight"]
    assert found.tensor_type.name == ("Q4_0" if bits == 4 else "Q8_0")
    back = gguf.dequantize(found.data, found.tensor_type)
    assert np.array_equal(back, loaded.model.layers[1].mlp.down_proj.quantized().dequantize().numpy())
    assert isinstance(report, GgufReport) and report.kept == 14 and not report.changed
    assert f"14 layers as they were solved, {len(report.changed)} changed" in str(report)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, config=model.config
    )
    ids = ARCHITECTURES[name]()[1]["input_ids"]
    with torch.no_grad():
        ours, read_back = (m.eval()(ids).logits for m in (loaded, theirs))
    torch.testing.assert_close(ours, read_back, rtol=1e-2, atol=1e-2)  # embeddings are float16 in the file


def test_a_folder_of_llm_quantize_keeps_codes_and_says_which_it_changes(tmp_path):
    folder = files.save(files.byte_level(), build("LlamaForCausalLM", vocab_size=403), tmp_path / "float")
    llm.quantize(folder, save=tmp_path / "w4", method="rtn", bits=4, group_size=16)
    report = export_gguf(tmp_path / "w4", tmp_path / "w4.gguf")
    assert report.kept == 0 and len(report.changed) == 14
    assert report.changed["blk.0.attn_q.weight"].startswith("Q8_0, requantized: groups of 16 inputs")
    assert "and 11 more" in str(report)
    llm.quantize(folder, save=tmp_path / "a4", method="rtn", bits=4, group_size=32, symmetric=False)
    report = export_gguf(tmp_path / "a4", tmp_path / "a4.gguf")
    assert {t.tensor_type.name for n, t in read(tmp_path / "a4.gguf")[1].items() if ".attn_q" in n} == {
        "Q4_1"
    }
    assert report.tensors["Q4_1"] == 14


def test_every_hyperparameter_of_a_llama(tmp_path):
    model = build("LlamaForCausalLM", rms_norm_eps=1e-5, head_dim=32)
    export_gguf(model, tmp_path / "m.gguf", outtype="q8_0", name="Tiny")
    keys, tensors = read(tmp_path / "m.gguf")
    expected = {
        "general.architecture": "llama", "general.type": "model", "general.name": "Tiny", "general.file_type": 7,
        "general.quantization_version": 2, "llama.context_length": 64, "llama.embedding_length": 64,
        "llama.block_count": 2, "llama.feed_forward_length": 128, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.attention.key_length": 32, "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32, "llama.rope.freq_base": 10000.0, "llama.vocab_size": 96,
        "tokenizer.ggml.model": "none",
    }  # fmt: skip
    assert {key: keys.get(key) for key in expected} == expected
    assert keys["general.size_label"] == "105K" and np.isclose(
        keys["llama.attention.layer_norm_rms_epsilon"], 1e-5
    )
    assert {n: t.tensor_type.name for n, t in tensors.items() if not n.startswith("blk.1")} == {
        "token_embd.weight": "Q8_0", "output_norm.weight": "F32", "blk.0.attn_norm.weight": "F32",
        "blk.0.ffn_norm.weight": "F32", **{
            f"blk.0.{n}.weight": "Q8_0"
            for n in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        },
    }  # fmt: skip


def test_llama3_positions_are_a_tensor_of_factors(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    export_gguf(build("LlamaForCausalLM", rope_parameters=rope), tmp_path / "m.gguf")
    keys, tensors = read(tmp_path / "m.gguf")
    factors = tensors["rope_freqs.weight"].data
    wave = 2 * np.pi * 5e5 ** (np.arange(0, 16, 2) / 16)
    blend = (32 / wave - 1) / 3
    expected = np.where(wave < 8, 1, np.where(wave > 32, 8, 1 / ((1 - blend) / 8 + blend)))
    assert np.allclose(factors, expected, rtol=1e-5) and keys["llama.rope.freq_base"] == 5e5
    with pytest.raises(ExportError, match="qwen2 cannot hold rotary positions of the type 'llama3'"):
        export_gguf(build("Qwen2ForCausalLM", rope_parameters=rope), tmp_path / "q.gguf")


@pytest.mark.parametrize(
    ("outtype", "matrix", "embedding"),
    [("f32", "F32", "F32"), ("auto", "F16", "F16"), ("bf16", "BF16", "BF16"), ("q4_1", "Q4_1", "Q8_0")],
)
def test_outtypes(tmp_path, outtype, matrix, embedding):
    model = build("Qwen3ForCausalLM")
    export_gguf(model, tmp_path / "m.gguf", outtype=outtype)
    tensors = read(tmp_path / "m.gguf")[1]
    kinds = (tensors["blk.0.attn_v.weight"].tensor_type.name, tensors["token_embd.weight"].tensor_type.name)
    assert kinds == (matrix, embedding)
    got = gguf.dequantize(tensors["blk.0.attn_v.weight"].data, tensors["blk.0.attn_v.weight"].tensor_type)
    want = model.model.layers[0].self_attn.v_proj.weight.detach().numpy()
    assert np.abs(got.reshape(want.shape) - want).max() < {"Q4_1": 0.01, "BF16": 3e-4, "F16": 3e-5}.get(
        matrix, 1e-9
    )
    with pytest.raises(ExportError, match="outtype: must be one of auto, f32"):
        export_gguf(model, tmp_path / "x.gguf", outtype="q4_k_m")


# -- tokenizers ------------------------------------------------------------------------------------------
def test_sentencepiece_metadata(tmp_path):
    tokenizer = files.sentencepiece()
    rows = len(tokenizer) + 3
    tokenizer.chat_template = "{{ messages }}"
    export_gguf(build("LlamaForCausalLM", vocab_size=rows), tmp_path / "m.gguf", tokenizer)
    keys = read(tmp_path / "m.gguf")[0]
    tokens, kinds, scores = (keys[f"tokenizer.ggml.{n}"] for n in ("tokens", "token_type", "scores"))
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_space_prefix"] is True
    assert keys["tokenizer.ggml.add_bos_token"] is True and keys["tokenizer.ggml.add_eos_token"] is False
    assert [keys[f"tokenizer.ggml.{n}_token_id"] for n in ("bos", "eos", "unknown")] == [1, 2, 0]
    assert "tokenizer.ggml.padding_token_id" not in keys
    assert len(tokens) == len(kinds) == len(scores) == rows and len(set(tokens)) == rows
    assert kinds[:3] == [2, 3, 3] and kinds[3:259] == [6] * 256 and kinds[-4:] == [4, 5, 5, 5]
    assert tokens[3 + 10] == "<0x0A>" and tokens[-4:] == ["<think>"] + [f"[PAD{rows - i}]" for i in (3, 2, 1)]
    assert set(kinds[259:-4]) == {1} and keys["tokenizer.chat_template"] == "{{ messages }}"
    ranked = [scores[i] for i, text in enumerate(tokens) if i >= 259 and len(text) > 1 and kinds[i] == 1]
    assert ranked == sorted(ranked, reverse=True) and max(ranked) == 0


def test_scores_that_cannot_say_what_the_merges_say_are_noted(tmp_path):
    """Merges a+b, ab+c: the pieces a and bc would be joined by llama.cpp, because abc is a token."""
    told = json.loads(files.sentencepiece().backend_tokenizer.to_str())
    texts = [*list(told["model"]["vocab"])[:259], "a", "b", "c", "ab", "bc", "abc"]
    told["model"]["vocab"] = {text: i for i, text in enumerate(texts)}
    told["model"]["merges"] = [["b", "c"], ["a", "b"], ["ab", "c"]]
    told["added_tokens"] = told["added_tokens"][:3]
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    report = export_gguf(build("LlamaForCausalLM", vocab_size=265), tmp_path / "m.gguf", tmp_path)
    assert any("1 joins of pieces are no merges" in note for note in report.notes)


def test_byte_level_metadata(tmp_path):
    tokenizer = files.byte_level()
    export_gguf(build("Qwen2ForCausalLM", vocab_size=len(tokenizer)), tmp_path / "m.gguf", tokenizer)
    keys = read(tmp_path / "m.gguf")[0]
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    told = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    assert keys["tokenizer.ggml.merges"] == [" ".join(pair) for pair in told["merges"]]
    assert keys["tokenizer.ggml.tokens"][:2] == ["<|im_start|>", "<|im_end|>"]
    assert keys["tokenizer.ggml.token_type"] == [3, 3, *[1] * (len(tokenizer) - 3), 4]
    assert keys["tokenizer.ggml.eos_token_id"] == 1 and keys["tokenizer.ggml.add_bos_token"] is False
    assert "tokenizer.ggml.bos_token_id" not in keys and "tokenizer.ggml.scores" not in keys


def test_unigram_metadata(tmp_path):
    tokenizer = files.unigram()
    export_gguf(build("LlamaForCausalLM", vocab_size=len(tokenizer)), tmp_path / "m.gguf", tokenizer)
    keys = read(tmp_path / "m.gguf")[0]
    assert keys["tokenizer.ggml.model"] == "t5" and keys["tokenizer.ggml.add_eos_token"] is True
    assert keys["tokenizer.ggml.token_type"][:3] == [3, 3, 2]
    vocab = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    assert np.allclose(keys["tokenizer.ggml.scores"], [score for _, score in vocab])


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)  # as in Llama 3's tokenizer.json
CUTS = {
    "llama-bpe": ((LLAMA3,), {"ignore_merges": True}),
    "dbrx": ((LLAMA3,), {}),
    "qwen2": ((LLAMA3.replace("{1,3}", ""),), {}),
    "qwen2 ": (
        (LLAMA3.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)").replace("{1,3}", ""),),
        {},
    ),
    "deepseek-v3": (
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_the_way_a_tokenizer_cuts_is_known_by_what_it_does(tmp_path, name):
    patterns, settings = CUTS[name]
    tokenizer = files.byte_level(files.split_at(*patterns), **settings)
    report = export_gguf(build("LlamaForCausalLM", vocab_size=len(tokenizer)), tmp_path / "m.gguf", tokenizer)
    assert read(tmp_path / "m.gguf")[0]["tokenizer.ggml.pre"] == name.strip() and not report.notes


def test_an_unknown_way_is_refused_unless_it_is_named(tmp_path):
    tokenizer = files.byte_level(files.split_at(r"\p{L}{1,5}|\p{N}|\s|."))
    model = build("LlamaForCausalLM", vocab_size=len(tokenizer))
    with pytest.raises(ExportError, match=r"no name that we know .* pass its name with pre="):
        export_gguf(model, tmp_path / "m.gguf", tokenizer)
    report = export_gguf(model, tmp_path / "m.gguf", tokenizer, pre="viking")
    assert read(tmp_path / "m.gguf")[0]["tokenizer.ggml.pre"] == "viking"
    assert report.notes == ["pre viking: was given and is not checked"]


def test_tokenizers_that_llama_cpp_cannot_run_are_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = build("LlamaForCausalLM")
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ExportError, match="of the kind WordLevel"):
        export_gguf(model, tmp_path / "m.gguf", words)
    few = {"a": 0, "<0x00>": 1}
    bytes_lost = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(few, [], byte_fallback=True)))
    with pytest.raises(ExportError, match="255 of the 256 byte tokens are missing, such as <0x01>"):
        export_gguf(model, tmp_path / "m.gguf", bytes_lost)


def test_tokens_without_a_row_are_left_out_and_said(tmp_path):
    tokenizer = files.byte_level()
    report = export_gguf(
        build("LlamaForCausalLM", vocab_size=len(tokenizer) - 1), tmp_path / "m.gguf", tokenizer
    )
    assert report.notes == [
        "tokenizer: 1 of its tokens have no embedding and are left out, such as '<think>'"
    ]


# -- mistakes --------------------------------------------------------------------------------------------
def test_mistakes_are_refused_before_any_work(tmp_path):
    model = build("LlamaForCausalLM")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(ExportError, match=r"m\.gguf: already exists; .*overwrite=True"):
        export_gguf(model, path)
    assert path.read_bytes() == b"precious"
    with pytest.raises(ExportError, match="is a folder; name a file"):
        export_gguf(model, tmp_path)
    with pytest.raises(ExportError, match="its folder does not exist"):
        export_gguf(model, tmp_path / "no" / "m.gguf")
    with pytest.raises(ExportError, match=r"opt models cannot be written; there are: .*gemma2.*llama.*qwen3"):
        export_gguf(build("OPTForCausalLM"), tmp_path / "x.gguf")
    with pytest.raises(ExportError, match=r"is not a folder with a config.json"):
        export_gguf(tmp_path / "nowhere", tmp_path / "x.gguf")
    with pytest.raises(ExportError, match="expected a module or a folder, got dict"):
        export_gguf({}, tmp_path / "x.gguf")
    with pytest.raises(ExportError, match="Linear has no config of transformers"):
        export_gguf(torch.nn.Linear(2, 2), tmp_path / "x.gguf")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ExportError, match=r"holds no tokenizer .* tokenizer="):
        export_gguf(tmp_path / "model", tmp_path / "x.gguf")
    report = export_gguf(tmp_path / "model", tmp_path / "x.gguf", tokenizer=False)
    assert report.notes == [
        next(n for n in report.notes if n.startswith("no tokenizer: llama.cpp takes token ids"))
    ]


def test_a_classifier_of_the_same_type_is_refused(tmp_path):
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification(build("LlamaForCausalLM").config)
    with pytest.raises(ExportError, match="LlamaForSequenceClassification is not a causal language model"):
        export_gguf(model, tmp_path / "x.gguf")


def test_a_folder_that_lacks_a_tensor_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    build("Qwen2ForCausalLM").save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ExportError, match=r"1 tensors of the model are not in its files, such as .*up_proj"):
        export_gguf(tmp_path / "model", tmp_path / "x.gguf", tokenizer=False)


def test_a_corrupt_file_is_named(tmp_path):
    build("Qwen2ForCausalLM").save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"model.safetensors: cannot be read: .*; copy or download"):
        export_gguf(tmp_path / "model", tmp_path / "x.gguf", tokenizer=False)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"precious")
    monkeypatch.setattr(
        gguf.GGUFWriter, "write_tensor_data", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        export_gguf(build("LlamaForCausalLM"), path, overwrite=True)
    assert path.read_bytes() == b"precious" and [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def _saved(tokenizer, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


# -- the certificate ---------------------------------------------------------------------------------------------
def answer(model, sign: float, asked: list) -> object:
    """llama.cpp's place: the logits of the model, or wrong ones."""

    def ask(path, prompts, every):
        assert every and Path(path).is_file()
        asked.append(prompts[0])
        with torch.no_grad():
            logits = model(torch.tensor(prompts)).logits
        return {"version": "1.2", "logits": (sign * logits).tolist()}

    return ask


def test_llama_cpp_is_asked_where_it_is_installed(tmp_path, monkeypatch):
    model, asked = build("LlamaForCausalLM"), []
    monkeypatch.setattr(certificate, "has_llama_cpp", lambda: True)
    monkeypatch.setattr(certificate, "ask_llama_cpp", answer(model, 1.01, asked))
    report = export_gguf(model, tmp_path / "m.gguf")
    assert str(report).endswith("\nllama.cpp 1.2: runs, logits within 1.00%") and len(asked[0]) == 16
    assert report.as_dict()["reader"]["state"] == "runs"
    monkeypatch.setattr(certificate, "ask_llama_cpp", answer(model, -1, asked))
    with pytest.raises(
        ReaderError, match=r"m2\.gguf: llama\.cpp 1\.2: failed: its logits differ .* by 20\d%"
    ) as e:
        export_gguf(model, tmp_path / "m2.gguf")
    assert e.value.report.reader.state == "failed" and (tmp_path / "m2.gguf").is_file()


def test_weights_that_the_file_rounds_to_four_bits_may_be_further_away(tmp_path, monkeypatch):
    model = build("LlamaForCausalLM")
    monkeypatch.setattr(certificate, "has_llama_cpp", lambda: True)
    monkeypatch.setattr(certificate, "ask_llama_cpp", answer(model, 1.7, []))
    with pytest.raises(ReaderError, match=r"by 7[01]%"):
        export_gguf(model, tmp_path / "f.gguf")
    assert export_gguf(model, tmp_path / "q.gguf", outtype="q4_0").reader.state == "runs"


def test_llama_cpp_that_is_not_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(certificate, "has_llama_cpp", lambda: False)
    report = export_gguf(build("LlamaForCausalLM"), tmp_path / "m.gguf")
    assert str(report).endswith("\nllama.cpp: not run: llama-cpp-python is not installed")
