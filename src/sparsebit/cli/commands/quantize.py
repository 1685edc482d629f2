"""`sparsebit quantize`: a run folder with the quantized model, its config, a log, and a checked ONNX file."""

from __future__ import annotations

from typing import Any

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.inputs.data import absolute, doubt_samples, length
from sparsebit.cli.inputs.inputs import Inputs
from sparsebit.cli.terminal.output import InputError, show


@command("quantize", "sparsebit quantize net.py:build --data images --input-shape 1,3,224,224 -o runs/w8a8")
def quantize(
    model: options.Model,
    output: options.Output,
    weights: options.Weights = None,
    data: options.Data = None,
    input_shape: options.InputShape = None,
    batch_size: options.BatchSize = 8,
    samples: options.Samples = 256,
    config: options.Config = None,
    preset: options.Preset = None,
    changes: options.Changes = None,
    trace: options.Trace = options.FrontEnd.auto,
    export: options.Export = True,
    fixed_batch: options.FixedBatch = False,
    tune: options.Tune = False,
    metric: options.Metric = None,
    resume: options.Resume = False,
    json: options.Json = False,
) -> int:
    """Quantize a model on a few samples of data; write weights, config, log and a checked ONNX file.

    Exit code 1 if the ONNX file could not be written or does not do what the model does; the rest of the run stays.
    """
    from sparsebit.cli.runs import compare, steps
    from sparsebit.cli.runs.run import check_output, running
    from sparsebit.cli.runs.slower import warn_if_slower

    if data is None:
        raise InputError("--data: quantization needs a few dozen samples to find the ranges of activations")
    inputs = Inputs(model, weights, data, input_shape, batch_size, samples)
    settings = options.quant_config(config, preset, changes)
    if tune and (settings.backend != "onnxruntime" or not export):
        raise InputError(
            "--tune: times ONNX files in onnxruntime, so it needs BACKEND: onnxruntime and --export"
        )
    asked = {"config": settings.to_dict(), "trace": trace.value, "metric": metric and absolute(metric)}
    if tune:
        asked["tune"] = True
    check_output(output, {"command": "quantize", "inputs": inputs.absolute(), "settings": asked}, resume)
    compare.check_metric(metric)
    net, batches = inputs.load()
    doubt_samples(data, batches)
    with running(output, "quantize", inputs, asked, resume) as run:
        if run.done("quantize"):
            qmodel = steps.load_quantized(run, net, batches)
        else:
            with run.step("quantize") as facts:
                qmodel = steps.quantize(run, net, batches, settings, trace.value)
                layers = steps.describe(run, qmodel, batches[0])
                facts.update(samples=sum(map(length, batches)), batch=length(batches[0]))
                facts.update(_sizes(layers["totals"]))
        if export:
            exported = steps.export_step(run, qmodel, batches, fixed_batch, tune)
        else:
            exported = {"ok": None}
        compare.compare(run, net, qmodel, batches, output / steps.ONNX, metric)
        warn_if_slower(run)
        steps.refresh_report(output)
    facts = run.about["steps"]["quantize"]
    result = {"ok": exported["ok"] is not False, "run": str(output), "quantize": facts, "export": exported}
    result |= compare.results(run)
    show(result, _text(result), json)
    return 0 if result["ok"] else 1


def _sizes(totals: dict[str, int]) -> dict[str, int]:
    return {key: totals[key] for key in ("bytes", "quantized_bytes", "quantized", "float") if key in totals}


def _text(result: dict[str, Any]) -> str:
    from sparsebit.cli.runs import compare
    from sparsebit.quantization.analysis.text import size

    facts = result["quantize"]
    exported = result["export"]
    lines = [
        f"quantized    {facts['quantized']} ops on {facts['samples']} samples, {facts['float']} ops stay float",
        f"parameters   {size(facts['bytes'])} -> {size(facts['quantized_bytes'])}",
        *exported.get("certificate", []),
        *compare.lines(result),
        f"written to   {result['run']}",
    ]
    return "\n".join(lines)
