"""The scripts with the original's names run, and give what they say."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch
from test_walk import tiny, tokens

from sparsebit import llm
from sparsebit.llm.legacy import from_legacy, to_legacy

ROOT = Path(__file__).resolve().parents[2]


def script(name: str):
    return runpy.run_path(str(ROOT / "examples" / "llm" / name))["main"]


def test_pack32_to_pack8_and_back(tmp_path, capsys):
    model = tiny()
    llm.quantize(model, save=tmp_path / "out", method="rtn", group_size=16, symmetric=False)
    loaded = llm.load(tmp_path / "out", model)
    torch.save(to_legacy(loaded), tmp_path / "a.pt")
    main = script("convert_pack32topack8.py")
    main([str(tmp_path / "a.pt"), str(tmp_path / "b.pt")])
    assert "21 layers" in capsys.readouterr().out
    main([str(tmp_path / "b.pt"), str(tmp_path / "c.pt"), "--to32"])
    a, b, c = (torch.load(tmp_path / f"{n}.pt") for n in "abc")
    assert b["model"]["layers.0.gate.qweight"].dtype == torch.int8
    assert all(torch.equal(v, c["model"][k]) for k, v in a["model"].items())
    torch.testing.assert_close(from_legacy(b, model)(tokens()[0]), loaded(tokens()[0]), rtol=1e-5, atol=1e-5)
    with pytest.raises(SystemExit, match=r"not packed as torch\.int32"):
        main([str(tmp_path / "b.pt"), str(tmp_path / "d.pt")])


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("save", ["out", "old.pt"])
def test_convert_and_inference(tmp_path, save, capsys):
    sys.path.insert(0, str(ROOT / "tests" / "zoo"))
    __import__("zoo_shim").install()
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(60)]
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "<pad>", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    model_dir = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>").save_pretrained(model_dir)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(model_dir)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(words[i] for i in torch.randint(0, 60, (400,)).tolist()))
    figure = script("convert.py")([
        str(model_dir), "--text", str(text), "--eval-text", str(text), "--nsamples", "4", "--seqlen", "32",
        "--candidate-bits", "2", "3", "4", "--average-bits", "3", "--groupsize", "32", "--save", str(tmp_path / save),
    ])  # fmt: skip
    shown = capsys.readouterr().out
    assert "14 layers at" in shown and f"perplexity {figure:.3f}" in shown and 10 < figure < 300
    out = script("inference.py")(
        [str(model_dir), str(tmp_path / save), "--prompt", "w1 w2 w3", "--max-new-tokens", "4"]
    )
    assert len(out.split()) == 7
