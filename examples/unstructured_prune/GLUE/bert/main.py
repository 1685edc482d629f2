"""Unstructured pruning of a BERT (CoLA of GLUE): accuracy for several shares of zeros, with and without calibration.

python main.py                                      sentences of a small grammar, seconds
python main.py --data GLUE/CoLA --samples 8551      train.tsv and dev.tsv
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from helpers import cola, loops, sentences

from sparsebit.sparse import SparseModel, parse_sconfig


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = loops.parser(__doc__, __file__, samples=1200, epochs=10, config="sconfig.yaml", model="")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="shares of zeros")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    train, test = sentences.load(args.data, args.samples)
    model, (ids, mask), held_out = cola.trained(train, test, args.epochs)
    wanted = torch.tensor([label for label, _ in test])

    score = lambda net: (loops.outputs(net, *held_out).argmax(1) == wanted).float().mean().item() * 100
    results = {"float %": score(model)}
    batches = list(zip(ids[:256].split(32), mask[:256].split(32)))
    for strategy in ("l1norm", "sparsegpt"):  # by size; and with the other weights making up for what goes
        for ratio in args.ratios:
            section = parse_sconfig(args.config).override("SPARSER.STRATEGY", strategy)
            smodel = SparseModel(model, section.override("SPARSER.RATIO", ratio), batches[0])
            smodel.calibrate(batches)
            smodel.calc_params()
            results[f"{strategy} {ratio:.0%}"] = score(smodel)
    loops.export(smodel, batches[0], args.onnx)
    return loops.show(results)


if __name__ == "__main__":
    main()
