"""MiniLM on STS-B: Spearman's rank correlation of cosine similarity and score."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

import minilm
from real.feeds import Array
from real.network import Measure, Network, save_data
from real.place import Place

CALIBRATE, PAIRS = 128, 500


class MiniLM(Network):
    """128 sentences of the test part calibrate, 500 pairs of the dev part judge."""

    name, metric = "MiniLM", "Spearman x 100"
    batch = 16
    attention = True
    axes = {key: {0: "batch", 1: "length"} for key in ("input_ids", "attention_mask")}

    def model(self, place: Place) -> torch.nn.Module:
        import five_models

        return five_models.Sentences(minilm.minilm()[0]).eval()

    def prepare(self, place: Place) -> None:
        if minilm.missing():
            raise SystemExit(minilm.missing())
        tokenizer = minilm.minilm()[1]
        first, second, scores = minilm.pairs("dev")
        chosen = np.random.default_rng(0).permutation(len(first))[:PAIRS]
        sentences = [first[i] for i in chosen] + [second[i] for i in chosen]
        order = minilm.by_length(sentences)
        judge = minilm.batches(tokenizer, [sentences[i] for i in order], self.batch)
        known = minilm.batches(tokenizer, minilm.pairs("test")[0][:CALIBRATE], self.batch)
        full = {"input_ids": np.full((1, 128), 2000), "attention_mask": np.ones((1, 128), np.int64)}
        as_arrays = [[{k: v.numpy() for k, v in batch.items()} for batch in part] for part in (known, judge)]
        save_data(place, as_arrays[0], as_arrays[1], full)
        place.truth.write_text(json.dumps({"order": order, "scores": scores[torch.tensor(chosen)].tolist()}))
        write_float(self.model(place), known[0], place.file("float"))

    def measure(self, place: Place, outputs: list[Array]) -> Measure:
        """Over pairs: row i is the pair of sentence i and sentence i + PAIRS."""
        truth = json.loads(place.truth.read_text())
        vectors = normalize(torch.from_numpy(outputs[0])[torch.tensor(truth["order"]).argsort()], dim=1)
        first, second = vectors.split(PAIRS)
        found, scores = (first * second).sum(1), torch.tensor(truth["scores"])
        return lambda rows: 100 * minilm.spearman(found[rows], scores[rows])

    def samples(self, rows: int) -> Array:
        return np.arange(rows // 2)


def write_float(model: torch.nn.Module, batch: dict[str, torch.Tensor], file: Path) -> None:
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    with contextlib.redirect_stdout(io.StringIO()):
        program = torch.onnx.export(
            *(model, ()),
            kwargs=batch,
            input_names=list(batch),
            dynamic_shapes=dict.fromkeys(batch, axes),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(str(file), external_data=False)
