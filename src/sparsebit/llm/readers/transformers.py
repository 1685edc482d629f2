"""transformers: before the work it loads the planned tensors without memory, after the work it runs the folder.

Facts about its versions 5.x with compressed-tensors 0.15 to 0.20, each of which has a test:
- Packed layers have no `weight` while a model is built. Classes that look at it then (Mamba, GPT-BigCode, RWKV, T5)
  load with `dequantize`, which unpacks all layers by the scheme of the first config group; since 5.23.
- Packed zero points do not fit into the package's own layers; with `dequantize` they do.
- Stacked experts are always unpacked: without zero points, and all by one scheme.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ExportError
from sparsebit.llm.readers import READERS, Packed, Plan, Reader, Verdict, clean

PACKAGE = "compressed-tensors"


@READERS.register()
class Transformers(Reader):
    TYPE = "transformers"
    formats = ("compressed-tensors", "int-quantized", "turned", "gptq", "dense")

    def version(self) -> str:
        return version_of("transformers")

    def missing(self, plan: Plan) -> str:
        needs = {"gptq": ("optimum", "gptqmodel"), "dense": ()}.get(
            plan.format, ("compressed_tensors", "accelerate")
        )
        absent = [name for name in ("transformers", *needs) if importlib.util.find_spec(name) is None]
        if absent:
            return f"needs {' and '.join(absent)}, not installed here"
        return ""

    def judge(self, plan: Plan) -> Verdict:
        reason = _refusal(plan)
        if reason:
            return Verdict(reason)
        absent = self.missing(plan)
        if absent or plan.format == "gptq":
            return Verdict(unknown=absent or "its rules for gptq are optimum's")
        try:
            return self._try(plan)
        except ExportError as error:
            return Verdict(unknown=str(error))

    def _try(self, plan: Plan) -> Verdict:
        """First packed; then unpacked at loading, if that gives the same weights."""
        about = plan.config.get("quantization_config", {})
        unpacks = plan.format in ("compressed-tensors", "turned") and _one_scheme(plan)
        reason = "" if about.get("dequantize") else probe(plan)
        if not about.get("dequantize") and not reason:
            return Verdict()
        if not unpacks:
            return Verdict(reason)
        settings = {"dequantize": True}
        again = probe(plan.with_settings(settings))
        if again:
            return Verdict(f"{again}{_later(self.version())}")
        return Verdict(settings=settings)

    def logits(self, folder: Path, inputs: Mapping[str, Tensor]) -> Tensor:
        from safetensors.torch import load_file, save_file

        config = json.loads((folder / "config.json").read_text())
        with tempfile.TemporaryDirectory() as place:
            given = Path(place, "inputs.safetensors")
            found = Path(place, "logits.safetensors")
            save_file(
                {
                    name: tensor.clone(memory_format=torch.contiguous_format)
                    for name, tensor in inputs.items()
                },
                given,
            )
            question = {
                "task": "run",
                "folder": str(folder.resolve()),
                "inputs": str(given),
                "outputs": str(found),
            }
            extra = config.get("sparsebit", {}).get("extra", [])
            answer = clean.ask(
                {**question, "architecture": (config.get("architectures") or [""])[0], "extra": extra}
            )
            reason = _reason(answer)
            if reason:
                raise ExportError(reason)
            return load_file(found)["logits"]


def probe(plan: Plan) -> str:
    """Why transformers does not load such a checkpoint; empty where it does."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "config.json").write_text(json.dumps(plan.config))
        question = {
            "task": "probe",
            "config": place,
            "architecture": plan.architecture,
            "tensors": plan.tensors,
        }
        answer = clean.ask(question)
    about = plan.config.get("quantization_config", {})
    if about.get("dequantize") and "info" in answer:
        rows = {name: layer for name, layer in plan.layers.items() if not layer.spec.group}
        answer["info"]["mismatched_keys"] = [
            entry for entry in answer["info"]["mismatched_keys"] if not _only_rounded(json.loads(entry), rows)
        ]
    return _reason(answer)


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _refusal(plan: Plan) -> str:
    """The facts that are known without a process."""
    experts = {layer.spec for layer in plan.layers.values() if layer.expert}
    if plan.format == "gptq":
        if experts:
            return "its experts are one tensor, which optimum does not pack"
        return ""
    for name, layer in plan.layers.items():
        if layer.spec.group and layer.inputs % layer.spec.group:
            return f"{layer.inputs} inputs of {name} are no multiple of {layer.spec.group}"
    if any(not spec.symmetric for spec in experts):
        return "it unpacks experts without their zero points; use symmetric=True"
    if len(experts) > 1:
        return "it unpacks all experts by one scheme, and here are several; use one width"
    if len(plan.kinds) > 1 and any(not spec.symmetric for spec in plan.kinds):
        return "it unpacks zero points by one scheme, and here are several; use symmetric=True, or one width"
    return ""


def _later(version: str) -> str:
    """Older versions unpack after loading, when a class has looked for its weights already."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    if numbers < [5, 23]:
        return " (5.23 and later unpack layers while they load)"
    return ""


def _one_scheme(plan: Plan) -> bool:
    return len(plan.kinds) == 1


def _only_rounded(entry: list[Any], rows: Mapping[str, Packed]) -> bool:
    """Without memory the package rounds the inputs of a packed row up to whole words; with memory it does not."""
    name, found, expected = entry
    layer = rows.get(name.removesuffix(".weight"))
    if layer is None or len(found) != 2 or len(expected) != 2 or found[0] != expected[0]:
        return False
    words = -(-expected[1] * layer.spec.bits // 32)
    return bool(found[1] == words * 32 // layer.spec.bits)


def _reason(answer: dict[str, Any]) -> str:
    """An error, or tensors that did not find their place, in a few words."""
    if "error" in answer:
        text = str(answer["error"]).splitlines()[0][:200]
        if "automatic conversion" in text:
            return "its tensors could not be converted while loading"
        return text
    words = {
        "missing_keys": "would get random values, such as {}",
        "unexpected_keys": "of the files have no place, such as {}",
        "mismatched_keys": "have another shape, such as {}",
        "conversion_errors": "could not be converted, such as {}",
        "error_msgs": "errors: {}",
    }
    for key, text in words.items():
        names = answer["info"][key]
        if names:
            return f"{len(names)} tensors {text.format(_shown(names[0]))}"
    return ""


def _shown(entry: str) -> str:
    return entry if len(entry) < 120 else entry[:117] + "..."
