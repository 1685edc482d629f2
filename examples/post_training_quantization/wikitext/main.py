"""Post-training quantization of a GPT-2, measured by its perplexity.

python main.py                                      text of a small grammar, seconds
python main.py --data wikitext2/valid.txt           any text file; the last tenth is measured
python main.py --data wikitext2/valid.txt --model gpt2      a folder of transformers (config, weights, tokenizer)
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from helpers import loops, sentences
from helpers.transformer import Gpt
from torch import Tensor

import sparsebit

LENGTH = 32  # tokens of a window


def text_of(data: Path | None, samples: int) -> str:
    if data is not None:
        return data.read_text(encoding="utf-8")
    random = Random(0)
    return " . ".join(" ".join(sentences.sentence(random)) for _ in range(samples * 5))


def windows(tokens: Tensor, length: int, most: int) -> Tensor:
    return tokens[: len(tokens) // length * length].reshape(-1, length)[:most]


def next_token(model: Any, tokens: Tensor) -> Tensor:
    out = model(tokens)
    scores = out if isinstance(out, Tensor) else out["logits"]
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor) -> float:
    losses = [next_token(model, batch) * len(batch) for batch in tokens.split(16)]
    return (sum(losses) / len(tokens)).exp().item()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    help_text = "a folder of transformers; default: the small GPT-2 of this example, trained here"
    args = loops.parser(__doc__, __file__, samples=600, epochs=6, model=help_text).parse_args(arguments)
    torch.manual_seed(0)
    text = text_of(args.data, args.samples)
    if args.model:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = loops.folder(args.model)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
        model.config.use_cache = False
        tokens = AutoTokenizer.from_pretrained(folder, local_files_only=True)(text, return_tensors="pt")
        rows = windows(tokens["input_ids"][0], 256, args.samples)
    else:
        words = sentences.Vocabulary([text])
        rows = windows(words.stream(text), LENGTH, args.samples)
        model = Gpt(len(words), LENGTH)
    train, held_out = rows[: len(rows) * 9 // 10], rows[len(rows) * 9 // 10 :]
    if not args.model:
        loops.fit(model, (train,), args.epochs, lr=3e-3, loss=next_token)

    qmodel = sparsebit.quantize(model, train[:128].split(16), args.config)
    results = {
        "float perplexity": perplexity(model, held_out),
        "quantized perplexity": perplexity(qmodel, held_out),
    }
    loops.export(qmodel, train[:4], args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
