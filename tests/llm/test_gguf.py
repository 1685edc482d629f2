"""GGUF files hold the codes that were solved: gguf's own reader dequantizes them to our weights."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsebit import llm
from sparsebit.errors import ExportError
from sparsebit.llm.gguf import pack, to_gguf
from sparsebit.numeric.rtn import rtn
from sparsebit.numeric.spec import QuantSpec


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 32), (8, None)])
def test_blocks_are_what_the_format_says(bits, group):
    """Read by hand: a float16, then the integers."""
    q = rtn(torch.randn(5, 64), None, QuantSpec(bits, True, 0, group=group))
    q.codes[0, :2] = torch.tensor([0, 2**bits - 1], dtype=torch.uint8)
    rows = pack(q)
    size = 18 if bits == 4 else 34
    assert rows.shape == (5, 2 * size) and rows.dtype == np.uint8
    back = torch.empty(5, 64)
    for r, row in enumerate(rows):
        for b in range(2):
            block = row[b * size : (b + 1) * size].tobytes()
            scale = float(np.frombuffer(block[:2], np.float16)[0])
            for i in range(32):
                level = (block[2 + i % 16] >> (4 * (i // 16))) % 16 - 8 if bits == 4 else int.from_bytes(
                    block[2 + i : 3 + i], "little", signed=True
                )  # fmt: skip
                back[r, 32 * b + i] = scale * level
    assert torch.equal(back, q.dequantize())


def test_what_does_not_fit_is_refused():
    for spec in (
        QuantSpec(3, True, 0, group=32),
        QuantSpec(4, False, 0, group=32),
        QuantSpec(4, True, 0, group=16),
    ):
        with pytest.raises(ExportError, match="GGUF holds symmetric 4 or 8 bits"):
            pack(rtn(torch.randn(4, 64), None, spec))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_is_read_by_others(tmp_path, kind, bits):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed (pip install sparsebit[llm])")
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
    __import__("zoo_shim").install()
    module = importlib.import_module("test_transformers")
    model = module.build(kind, tie_word_embeddings=False)
    llm.quantize(model, save=tmp_path / "out", method="rtn", bits=bits, group_size=32)
    loaded = llm.load(tmp_path / "out")
    words = {"a": 0, "b": 1, "ab": 2}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": words, "merges": [["a", "b"]]}, "added_tokens": []})
    )
    to_gguf(loaded, tmp_path / "model.gguf", tokenizer=tmp_path)
    reader = gguf.GGUFReader(str(tmp_path / "model.gguf"))
    tensors = {t.name: t for t in reader.tensors}
    found = tensors["blk.1.ffn_down.weight"]
    assert found.tensor_type.name == ("Q4_0" if bits == 4 else "Q8_0")
    back = gguf.dequantize(found.data, found.tensor_type)
    assert np.array_equal(back, loaded.model.layers[1].mlp.down_proj.quantized().dequantize().numpy())
    theirs = module.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32,
                                                         config=model.config)  # fmt: skip
    with torch.no_grad():
        a, b = (m.eval()(module.tokens()[0]).logits for m in (loaded, theirs))
    torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)  # embeddings and head are float16 in the file
    with pytest.raises(ExportError, match="opt models cannot be written"):
        to_gguf(module.build("OPT"), tmp_path / "x.gguf")
