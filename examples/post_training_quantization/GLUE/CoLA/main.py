"""Post-training quantization of a BERT that tells right sentences from wrong ones (CoLA of GLUE).

python main.py                                      sentences of a small grammar, seconds
python main.py --data GLUE/CoLA --samples 8551      train.tsv and dev.tsv, with the small BERT of this example
python main.py --data GLUE/CoLA --model bert-cola   a folder of transformers (config, weights, tokenizer)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from helpers import cola, loops, sentences
from torch import Tensor

import sparsebit

Batch = dict[str, Tensor]


def own(
    train: sentences.Labelled, test: sentences.Labelled, epochs: int
) -> tuple[Any, list[Batch], list[Batch]]:
    """The small BERT of this example, trained here, and its inputs."""
    model, *parts = cola.trained(train, test, epochs)
    ids_and_masks = [zip(ids.split(32), mask.split(32)) for ids, mask in parts]
    return model, *([{"input_ids": i, "attention_mask": m} for i, m in part] for part in ids_and_masks)


def named(
    folder: str, train: sentences.Labelled, test: sentences.Labelled
) -> tuple[Any, list[Batch], list[Batch]]:
    """A fine-tuned model of transformers, from a folder, and its inputs."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    options = {"padding": "max_length", "truncation": True, "max_length": 64, "return_tensors": "pt"}

    def batches(part: sentences.Labelled) -> list[Batch]:
        texts = [text for _, text in part]
        return [dict(tokenizer(texts[i : i + 32], **options)) for i in range(0, len(texts), 32)]

    return model, batches(train[:256]), batches(test)


@torch.no_grad()
def logits(model: Any, batches: list[Batch]) -> Tensor:
    found = [model(**batch) for batch in batches]
    return torch.cat([out if isinstance(out, Tensor) else out["logits"] for out in found])


def main(arguments: list[str] | None = None) -> dict[str, float]:
    help_text = "a folder of transformers; default: the small BERT of this example, trained here"
    args = loops.parser(__doc__, __file__, samples=1200, epochs=10, model=help_text).parse_args(arguments)
    torch.manual_seed(0)
    train, test = sentences.load(args.data, args.samples)
    if args.model:
        model, batches, held_out = named(loops.folder(args.model), train, test)
    else:
        model, batches, held_out = own(train, test, args.epochs)

    qmodel = sparsebit.quantize(model, batches[:8], args.config)

    exact, got, wanted = logits(model, held_out), logits(qmodel, held_out), torch.tensor([y for y, _ in test])
    results = {
        "float %": (exact.argmax(1) == wanted).float().mean().item() * 100,
        "quantized %": (got.argmax(1) == wanted).float().mean().item() * 100,
        "quantized dB": loops.sqnr(exact, got),
    }
    loops.export(qmodel, batches[0], args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
