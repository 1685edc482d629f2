"""Runs a GGUF file in llama.cpp, in a separate process: a file that llama.cpp cannot run ends the process.

The process reads one JSON line of questions and prints one line of answers. It loads llama_cpp and nothing of
Sparsebit.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from sparsebit.errors import ExportError

CHILD = """
import ctypes, json, sys
import llama_cpp as c
import numpy as np

asked = json.loads(sys.stdin.readline())


def errors_only(level, text, data):
    if level >= 4:
        sys.stderr.write(text.decode(errors="replace"))


quiet = c.llama_log_callback(errors_only)
c.llama_log_set(quiet, ctypes.c_void_p(0))
c.llama_backend_init()
settings = c.llama_model_default_params()
settings.n_gpu_layers = 0
model = c.llama_model_load_from_file(asked["file"].encode(), settings)
if not model:
    sys.exit("llama.cpp cannot load the file")
vocabulary = c.llama_model_get_vocab(model)
size = c.llama_vocab_n_tokens(vocabulary)
found = {"version": c.__version__, "vocabulary": size, "ids": [], "logits": [], "greedy": []}
for text in asked["texts"]:
    data = text.encode()
    room = (c.llama_token * (2 * len(data) + 16))()
    count = c.llama_tokenize(vocabulary, data, len(data), room, len(room), True, True)
    found["ids"].append(list(room[: max(count, 0)]))


def ask(context, tokens, at, every):
    batch = c.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, at + i, 1, 0
        batch.logits[i] = every or i == len(tokens) - 1
    if c.llama_decode(context, batch):
        sys.exit("llama.cpp cannot run the model")
    rows = range(len(tokens)) if every else [len(tokens) - 1]
    values = [np.ctypeslib.as_array(c.llama_get_logits_ith(context, i), (size,)).tolist() for i in rows]
    c.llama_batch_free(batch)
    return values


length = max([len(p) for p in asked["prompts"]], default=0) + asked["new"] + 8
if asked["prompts"]:
    settings = c.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = length
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = 0
    if hasattr(settings, "flash_attn_type"):
        settings.flash_attn_type = 0
    context = c.llama_init_from_model(model, settings)
    if not context:
        sys.exit("llama.cpp cannot make a context for the model")
for tokens in asked["prompts"]:
    c.llama_memory_clear(c.llama_get_memory(context), True)
    rows = ask(context, tokens, 0, asked["every"])
    found["logits"].append(rows)
    last, answer = rows[-1], []
    for i in range(asked["new"]):
        answer.append(int(np.argmax(last)))
        last = ask(context, answer[-1:], len(tokens) + i, False)[-1]
    found["greedy"].append(answer)
print(json.dumps(found))
"""


def has_llama_cpp() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def ask_llama_cpp(
    path: str | Path,
    *,
    texts: list[str] | None = None,
    prompts: list[list[int]] | None = None,
    new: int = 0,
    every: bool = False,
) -> dict[str, Any]:
    """Ask llama.cpp about a file: `ids` of the texts, `logits` after the prompts, `greedy` tokens that follow.

    every   logits of all places of a prompt, not of the last one only.
    """
    asked = {
        "file": str(path),
        "texts": texts or [],
        "prompts": prompts or [],
        "new": new,
        "every": every,
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(asked) + "\n", capture_output=True, text=True
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ExportError(f"{path}: llama.cpp does not run it: {' '.join(lines[-4:])[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
