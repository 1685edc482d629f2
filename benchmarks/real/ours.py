"""Sparsebit, called as a user would: quantize(model, batches), export_onnx(...)."""

from __future__ import annotations

import time
from typing import Any

from real import network as networks
from real import place as places
from real.feeds import load_batches, save_outputs
from real.network import Network
from real.scores import decibels, rows_of

LEAST = 50.0  # dB between the float model and the float file


def write(network: Network, place: places.Place, label: str, config: str | None, backend: str | None) -> None:
    """The file, the outputs of the quantized model in torch, and how it went."""
    import sparsebit

    model = network.model(place)
    made: dict[str, Any] = {"config": config, "backend": backend, "float_sqnr": same(network, model, place)}
    place.file(label).unlink(missing_ok=True)
    start = time.monotonic()
    batches = list(load_batches(place.calibrate))
    qmodel = sparsebit.quantize(
        model, [networks.call_of(b) for b in batches], chosen(config, backend), progress=False
    )
    made["quantize_seconds"] = round(time.monotonic() - start, 1)
    save_outputs(place.outputs(label, "simulated"), networks.run(qmodel, load_batches(place.judge)))
    start = time.monotonic()
    report = qmodel.export_onnx(
        networks.call_of(batches[0]),
        str(place.file(label)),
        list(batches[0]),
        dynamic_axes=network.axes,
    )
    made.update(export_seconds=round(time.monotonic() - start, 1), certified=report.ok, report=str(report))
    places.write(place.made(label), made)
    print(
        f"{network.name} {label}: {made['quantize_seconds']} s to quantize, {made['export_seconds']} s to export"
    )


def same(network: Network, model: Any, place: places.Place) -> float:
    """The float model in torch beside the float file, in dB: a conversion that changes the network is an error."""
    first = next(load_batches(place.judge))
    count = len(next(iter(first.values())))
    found = network.rows(networks.run(model, [first]), count)[0]
    wanted = rows_of(network, place, "float", "here")[0][:count]
    near = decibels(wanted, found)
    if near < LEAST:
        raise ValueError(f"{network.name}: the model in torch is only {near} dB from the float file")
    return near


def chosen(config: str | None, backend: str | None) -> Any:
    from sparsebit import QuantConfig

    if backend is None:
        return config
    return QuantConfig.load(config or "w8a8").override("BACKEND", backend)
