"""`sparsebit prune`: a run folder with the smaller model, its plan, and a checked ONNX file."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.inputs.data import absolute
from sparsebit.cli.inputs.inputs import Inputs, example_of
from sparsebit.cli.terminal.output import InputError, show
from sparsebit.cli.terminal.progress import start, status

Ratio = Annotated[float | None, typer.Option(help="the share of channels to remove")]
Macs = Annotated[float | None, typer.Option(help="the share of multiplications that remains")]
Params = Annotated[float | None, typer.Option(help="the share of parameters that remains")]
Latency = Annotated[float | None, typer.Option(help="the share of time on this machine that remains")]
SparserName = Annotated[str, typer.Option(help="the criterion, see: sparsebit list sparsers")]
RoundTo = Annotated[
    int,
    typer.Option(
        min=0, help="layers keep the nearest multiple of this many channels; 0: of 8, those with 16 or more"
    ),
]
Scope = Annotated[str, typer.Option(help="layer: the same share of each; global: of all together")]
Heads = Annotated[str, typer.Option(help="of attention: remove whole heads, or the same dimension of each")]
Merge = Annotated[
    str,
    typer.Option(help="experimental: residual blocks to merge into the next one: auto, how many, or a,b,c"),
]
Depth = Annotated[
    str, typer.Option(help="experimental: residual branches that become a linear layer: how many, or a,b,c")
]


@command("prune", "sparsebit prune net.py:build --input-shape 1,3,224,224 --macs 0.5 -o runs/half")
def prune(
    model: options.Model,
    output: options.Output,
    weights: options.Weights = None,
    data: options.Data = None,
    input_shape: options.InputShape = None,
    batch_size: options.BatchSize = 8,
    samples: options.Samples = 256,
    ratio: Ratio = None,
    macs: Macs = None,
    params: Params = None,
    latency: Latency = None,
    sparser: SparserName = "l1norm",
    round_to: RoundTo = 0,
    scope: Scope = "layer",
    heads: Heads = "whole",
    merge: Merge = "0",
    depth: Depth = "0",
    export: options.Export = True,
    fixed_batch: options.FixedBatch = False,
    metric: options.Metric = None,
    resume: options.Resume = False,
    json: options.Json = False,
) -> int:
    """Remove the channels that matter least; write the plan, the weights and a checked ONNX file.

    With --data, the layers behind a cut are refit, and sparsers that look at data can be used.
    """
    from sparsebit.cli.runs import compare, steps
    from sparsebit.cli.runs.run import check_output, running
    from sparsebit.cli.runs.slower import warn_if_slower

    inputs = Inputs(model, weights, data, input_shape, batch_size, samples)
    how: dict[str, Any] = {"ratio": ratio, "macs": macs, "params": params, "latency": latency}
    how |= {"sparser": sparser, "round_to": round_to, "scope": scope, "heads": heads}
    how |= {"merge": _blocks(merge), "depth": _blocks(depth)}
    asked = {**how, "metric": metric and absolute(metric)}
    check_output(output, {"command": "prune", "inputs": inputs.absolute(), "settings": asked}, resume)
    start()
    _check_settings(how, data)
    compare.check_metric(metric)
    net, batches = inputs.load()
    _check_model(model, net)
    with running(output, "prune", inputs, asked, resume) as run:
        small = _pruned(run, net, batches, how, data is not None)
        if export:
            exported = steps.export_step(run, small, batches, fixed_batch)
        else:
            exported = {"ok": None}
        compare.compare(run, net, small, batches, output / steps.ONNX, metric)
        warn_if_slower(run)
        steps.refresh_report(output)
    result = {
        "ok": exported["ok"] is not False,
        "run": str(output),
        "prune": run.about["steps"]["prune"],
        "export": exported,
        **compare.results(run),
    }
    show(result, _text(result, small), json)
    return 0 if result["ok"] else 1


def _pruned(run: Any, net: Any, batches: list[Any], how: dict[str, Any], with_data: bool) -> Any:
    from sparsebit.cli.runs import steps

    if run.done("prune"):
        return steps.load_pruned(run, net, batches)
    with run.step("prune") as facts:
        small = _cut(net, batches, how, with_data)
        steps.save_pruned(run, small)
        with status("counting"):
            facts.update(_costs(net, small, batches[0]))
    return small


def _blocks(text: str) -> int | str | list[str]:
    """auto, 4, or names: layer1.0,layer1.1."""
    if text == "auto":
        return text
    if text.removeprefix("-").isdecimal():
        return int(text)
    return text.split(",")


def _check_settings(how: dict[str, Any], data: str | None) -> None:
    from sparsebit.sparse.sparsers import SPARSERS_MAP

    for name in ("merge", "depth"):
        if how[name] and data is None:
            raise InputError(f"--{name}: layers are fitted to data; add --data")
    sparser = how["sparser"]
    if sparser not in SPARSERS_MAP:
        raise InputError(f"--sparser {sparser}: no such sparser{SPARSERS_MAP.hint(sparser)}")
    if "structured" not in SPARSERS_MAP[sparser].KINDS:
        raise InputError(
            f"--sparser {sparser}: removes single weights, and this command channels; use Python"
        )
    if SPARSERS_MAP[sparser].NEEDS and data is None:
        raise InputError(f"--sparser {sparser}: decides by data; add --data")


def _check_model(spec: str, net: Any) -> None:
    from torch import nn

    if not isinstance(net, nn.Module):
        raise InputError(f"{spec}: pruning needs the model's own code; write it as file.py:factory")


def _cut(net: Any, batches: list[Any], asked: dict[str, Any], with_data: bool) -> Any:
    import sparsebit
    from sparsebit.sparse import prune_blocks

    asked = {**asked, "round_to": asked["round_to"] or None}  # 0 is the default of prune()
    blocks = {name: asked.pop(name) for name in ("merge", "depth")}
    with status("choosing and removing channels", batches if with_data else None) as shown:
        example = example_of(net, batches[0])
        if any(blocks.values()):
            return prune_blocks(net, example, batches=shown, **blocks, **asked)
        return sparsebit.prune(net, example, batches=shown, **asked)


def _costs(net: Any, small: Any, batch: Any) -> dict[str, Any]:
    """Parameters and multiplications, before and after."""
    from sparsebit.sparse.choose.costs import EXACT
    from sparsebit.sparse.labels.walk import walk_of

    walk = walk_of(net, example_of(net, batch))
    found = {name: EXACT[name](walk) for name in ("params", "macs")}
    return {name: [int(cost(net)), int(cost(small))] for name, cost in found.items()}


def _text(result: dict[str, Any], small: Any) -> str:
    from sparsebit.cli.runs import compare
    from sparsebit.quantization.analysis.text import count, share

    facts = result["prune"]
    rows = {"parameters": facts["params"], "MACs": facts["macs"]}
    lines = [f"{k:<12} {count(a)} -> {count(b)} ({share(b, a)})" for k, (a, b) in rows.items()]
    plan = []
    if hasattr(small, "pruning_plan"):
        plan = [str(small.pruning_plan)]
    certificate = result["export"].get("certificate", [])
    return "\n".join([*plan, *lines, *certificate, *compare.lines(result), f"written to   {result['run']}"])
