"""The clean process: transformers and nothing of Sparsebit. It is started by its text, and answers lines of JSON.

{"task": "probe", "config": folder, "architecture": name, "tensors": {name: [shape, dtype]}}
{"task": "run", "folder": folder, "architecture": name, "extra": names, "inputs": file, "outputs": file}

`extra` are tensors that had no place in the float model either.

It ends when its input ends, or after some time without a question, so that it does not hold memory during a long run.
"""

import contextlib
import importlib
import json
import os
import select
import sys
import warnings

IDLE = 60.0  # seconds
KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors")


class _NoSparsebit:
    """Refuses imports of Sparsebit: the checkpoint must run without it."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sparsebit":
            raise ImportError("this process is without sparsebit")
        return None


def prepare():
    """Imports, once; a torchvision that cannot be imported is left out, as transformers does where there is none."""
    sys.meta_path.insert(0, _NoSparsebit())
    warnings.filterwarnings("ignore")
    import torch

    try:
        importlib.import_module("torchvision")
    except Exception:  # a torchvision for another torch raises errors of any kind
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


def class_of(transformers, name, config):
    """The class of that name; where only the spelling differs, the language model of the config."""
    return getattr(transformers, name, None) or transformers.AutoModelForCausalLM._model_mapping[type(config)]


def probe(torch, transformers, ask):
    """Loads tensors without memory through everything that from_pretrained does: names, shapes, stacked experts."""
    config = transformers.AutoConfig.from_pretrained(ask["config"])
    state = {}
    for name, (shape, kind) in ask["tensors"].items():
        state[name] = torch.empty(shape, dtype=getattr(torch, kind), device="meta")
    with still_packed():
        _, info = class_of(transformers, ask["architecture"], config).from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=torch.float32,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    return {"info": listed(info)}


@contextlib.contextmanager
def still_packed():
    """Layers stay packed after loading; compressed-tensors does not unpack tensors without memory."""
    try:
        from compressed_tensors.compressors import ModelCompressor
    except ImportError:  # a format that does not need it
        yield
        return
    unpack = ModelCompressor.decompress_model
    ModelCompressor.decompress_model = lambda self, model: None
    try:
        yield
    finally:
        ModelCompressor.decompress_model = unpack


def run(torch, transformers, ask):
    from safetensors.torch import load_file, save_file

    config = transformers.AutoConfig.from_pretrained(ask["folder"])
    model, info = class_of(transformers, ask["architecture"], config).from_pretrained(
        ask["folder"], dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
    )
    found = listed(info)
    found["unexpected_keys"] = [key for key in found["unexpected_keys"] if key not in ask["extra"]]
    if any(found.values()):
        return {"info": found}
    torch.nn.Module.float(model)  # experts that were unpacked are in the dtype of their scales
    inputs = load_file(ask["inputs"])
    with torch.no_grad():
        out = model.eval()(**inputs)
    logits = out.logits if hasattr(out, "logits") else out[0]
    save_file({"logits": logits.float().contiguous()}, ask["outputs"])
    return {"info": found}


def listed(info):
    found = {}
    for key in KEYS:
        value = info.get(key) or ()
        items = value.items() if hasattr(value, "items") else value
        found[key] = sorted(
            str(item) if isinstance(item, str) else json.dumps(item, default=list) for item in items
        )
    return found


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    sys.stdout = sys.stderr
    modules = None
    wrong = ""
    try:
        modules = prepare()
    except Exception as error:  # the answer carries the error to the other process
        wrong = f"{type(error).__name__}: {error}"
    tasks = {"probe": probe, "run": run}
    while os.name == "nt" or select.select([sys.stdin], [], [], IDLE)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        ask = json.loads(line)
        try:
            if modules:
                answer = tasks[ask["task"]](*modules, ask)
            else:
                answer = {"broken": wrong}
        except Exception as error:  # the answer carries the error to the other process
            answer = {"error": f"{type(error).__name__}: {error}".strip()}
        answer["clean"] = "sparsebit" not in sys.modules
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


main()
