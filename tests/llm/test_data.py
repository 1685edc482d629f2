"""Calibration data that cannot work is refused before any work; padded positions count for nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from llm_assets import Llama, Sizes
from sparsebit import llm
from sparsebit.errors import CalibrationError
from sparsebit.llm.walk.data import prepare

SMALL = Sizes(dim=32, hidden=128, layers=2, heads=4, kv_heads=2, vocab=64, length=64)


def rows(n: int, length: int = 12, words: int = 64) -> torch.Tensor:
    return torch.randint(3, words, (n, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("batches, words", [
    ([rows(1, 5)], ["5 tokens are too few", "128 inputs", "give 16 or more"]),
    ([], ["`batches` is empty"]),
    ([rows(4), rows(4) + 60], ["batch 1 has the token 116", "knows 0 to 63", "another tokenizer"]),
    ([rows(4) - 10], ["batch 0 has the token -", "knows 0 to 63"]),
    ([rows(4)[:, :0]], ["batch 0 has no tokens"]),
])  # fmt: skip
def test_bad_data_of_a_users_own_module(tmp_path, batches, words):
    with pytest.raises(CalibrationError) as error:
        llm.quantize(Llama(SMALL).eval(), batches, save=tmp_path / "out", group_size=16)
    assert not [w for w in words if w not in str(error.value)], error.value
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_methods_without_data_take_few_tokens(tmp_path):
    report = llm.quantize(Llama(SMALL).eval(), [rows(1, 5)], method="rtn", save=tmp_path, group_size=16)
    assert report.measured.tokens == 4


class Flat(nn.Module):
    """Takes floats: there are no tokens to be checked or counted."""

    def forward(self, x):
        return x


def test_divided(tmp_path):
    model = Flat()
    whole = prepare(model, [torch.ones(2, 3, 4)] * 20, 8)
    assert len(whole.fitted) == 19 and len(whole.held) == 1 and whole.tokens is None and whole.apart
    few = prepare(model, [torch.ones(2, 3, 4)] * 3, 8)
    assert len(few.fitted) == 3 and len(few.held) == 3 and not few.apart
    tokens = rows(64)
    data = prepare(Llama(SMALL), iter(tokens.split(10)), 8)
    assert torch.equal(torch.cat(data.fitted), tokens[:60]) and torch.equal(torch.cat(data.held), tokens[60:])
    assert data.tokens == tokens.numel()
    many = prepare(Llama(SMALL), rows(1000), 8)
    assert sum(map(len, many.held)) == 16  # to measure takes no longer for more data
    unread = prepare(Llama(SMALL), rows(3), 8, reads=False)
    assert unread.fitted == [] and torch.equal(unread.held[0], rows(3)) and unread.apart


# -- models of transformers ----------------------------------------------------------------------------------
if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (pip install sparsebit[llm])", allow_module_level=True)
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "zoo")]
__import__("zoo_shim").install()
from tiny_transformers import ARCHITECTURES, batch_of  # noqa: E402

LLAMA, T5, LLAVA = "LlamaForCausalLM", "T5ForConditionalGeneration", "LlavaForConditionalGeneration"


def padded(tokens: torch.Tensor, left: bool) -> dict[str, torch.Tensor]:
    """Behind four sequences of other lengths, on one side, stands rubbish that a mask hides."""
    lengths = torch.tensor([12, 7, 12, 9])
    mask = torch.arange(12)[None] < lengths[:, None]
    mask = mask.flip(1) if left else mask
    return {"input_ids": torch.where(mask, tokens, 5), "attention_mask": mask.long()}


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("model-block-*.safetensors")}


@pytest.mark.parametrize("left", [False, True])
def test_padded_positions_count_for_nothing(tmp_path, left):
    """The same bytes as from sequences that were never padded."""
    model, _ = ARCHITECTURES[LLAMA]()
    tokens, batches, alone = rows(16, 12, 96), [], []
    for part in tokens.split(4):
        batch = padded(part, left)
        batches.append(batch)
        cut = [row[mask.bool()][None] for row, mask in zip(batch["input_ids"], batch["attention_mask"])]
        alone += [torch.cat([cut[0], cut[2]]), cut[1], cut[3]]
    for name, data in (("padded", batches), ("alone", alone)):
        llm.quantize(model, data, save=tmp_path / name, bits=4)
    assert folder_bytes(tmp_path / "padded") == folder_bytes(tmp_path / "alone")


def test_padding_without_a_mask_is_seen(caplog):
    model, _ = ARCHITECTURES[LLAMA]()  # its padding token is 0
    tokens = rows(2, 12, 96)
    tokens[0, 6:] = 0
    found = prepare(model, [tokens], 8, reads=False).held
    assert sorted(map(tuple, (t["input_ids"].shape for t in found))) == [(1, 6), (1, 12)]
    assert "6 tokens 0 at the ends of sequences are taken for padding" in caplog.text
    tokens[0] = 0  # a row of nothing else
    found = prepare(model, [tokens], 8, reads=False).held
    assert [t["input_ids"].tolist() for t in found] == [tokens[1:].tolist()]
    assert "all of it is padding" in refused(model, [torch.zeros(2, 12, dtype=torch.long)])
    tokens = rows(2, 12, 96)
    tokens[0, 10:] = 0  # too few to be sure
    assert torch.equal(prepare(model, [tokens], 8, reads=False).held[0], tokens)


def test_both_sides_of_an_encoder_decoder():
    model, _ = ARCHITECTURES[T5]()
    ids, answer = rows(3, 8, 96), rows(3, 6, 96)
    mask, labels = torch.ones_like(ids), answer.clone()
    mask[1, 5:], labels[2, 4:] = 0, -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    found = prepare(model, [batch], 8, reads=False).held
    shapes = [(tuple(b["input_ids"].shape), tuple(b["labels"].shape)) for b in found]
    assert shapes == [((1, 8), (1, 6)), ((1, 5), (1, 6)), ((1, 8), (1, 4))]
    assert all(bool((b["labels"] != -100).all()) and bool(b["attention_mask"].all()) for b in found)
    assert all(t.is_contiguous() for b in found for t in b.values())  # BART's loss wants a view of the labels


def refused(model, batches) -> str:
    with pytest.raises(CalibrationError) as error:
        prepare(model, batches, 8)
    return str(error.value)


def test_what_is_refused():
    model, _ = ARCHITECTURES[LLAMA]()
    assert "sequences of 65 tokens, but the model was made for 64" in refused(model, [rows(2, 65, 96)])
    holes = padded(rows(4, 12, 96), False)
    holes["attention_mask"][0, 3] = 0
    assert "batch 0, sequence 0 is masked in its middle" in refused(model, [holes])
    nothing = {"input_ids": rows(4, 12, 96), "attention_mask": torch.zeros(4, 12)}
    assert "all of it is padding" in refused(model, [nothing])


def test_images_beside_padding():
    model, batch = ARCHITECTURES[LLAVA]()
    mask = torch.ones_like(batch["input_ids"])
    assert len(prepare(model, [{**batch, "attention_mask": mask}], 8).fitted) == 1
    mask[:, :2] = 0
    assert "batches of one sample each" in refused(model, [{**batch, "attention_mask": mask}])
    far = {**batch, "input_ids": batch["input_ids"].clone()}
    far["input_ids"][0, 0] = 5000
    assert "has the token 5000" in refused(model, [far])
    assert batch_of(LLAVA, 3)["input_ids"].shape  # another batch of that model is fine
    prepare(model, [batch_of(LLAVA, 3)], 8)
