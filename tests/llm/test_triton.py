"""The Triton kernels, run by triton's interpreter on the CPU: this shows what they compute, not how fast."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CHECK = """
import itertools, torch
from sparsebit.llm.layers import triton_kernels as kernels
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.numeric.quantized_weight import QuantizedWeight

def compare(bits, group, outputs, inputs, rows, dtype, ordered=False):
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    groups = -(-inputs // (group or inputs))
    zeros = torch.randint(0, 2**bits, (outputs, groups), dtype=torch.uint8)
    scales = torch.rand(outputs, groups).half()
    index = torch.randperm(inputs) // group if ordered else None
    q = QuantizedWeight(codes, scales, zeros, bits, False, group, index)
    layer = QuantLinear(q)
    level = codes.double() - zeros.double()[:, q.groups]
    expected = level * scales.double()[:, q.groups]
    assert torch.equal(kernels.dequantize(layer, torch.float32).double(), expected.float().double())
    x = torch.randn(rows, inputs).to(dtype)
    out = kernels.multiply(layer, x)
    assert out.dtype == dtype and out.shape == (rows, outputs)
    right = x.double() @ expected.T
    error = ((out - right).abs().max() / right.abs().max()).item()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2), (bits, group, dtype, error)

torch.manual_seed(0)
for bits, (group, inputs) in itertools.product((2, 3, 4, 8), ((32, 96), (64, 160), (None, 100))):
    compare(bits, group, 40, inputs, 3, torch.float32)
for bits in (2, 3, 4, 8):
    compare(bits, 32, 33, 64, 17, torch.float16)
    compare(bits, 16, 16, 80, 1, torch.float32, ordered=True)

# QuantLinear takes them for CUDA tensors; here it is told that these are some
from sparsebit.llm.layers import kernels as choice
from sparsebit.numeric.kernels import use_native
use_native(False)
layer = QuantLinear(QuantizedWeight(torch.randint(0, 8, (20, 48), dtype=torch.uint8), torch.rand(20, 3).half(),
                                    torch.full((20, 3), 4, dtype=torch.uint8), 3, True, 16), torch.randn(20))
plain, asked = layer.quantized().dequantize(), []
choice.for_gpu = lambda x: asked.append(x) or kernels
for rows in (2, 65):  # the second is dequantized
    x = torch.randn(1, rows, 48, requires_grad=True)
    out = layer(x)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, plain, layer.bias), rtol=1e-4, atol=1e-4)
    out.sum().backward()
    torch.testing.assert_close(x.grad, plain.sum(0).expand_as(x), rtol=1e-4, atol=1e-4)
assert len(asked) == 5  # product, and dequantize for the gradient; for many rows once more
print("same")
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sparsebit.llm.layers import triton_kernels as kernels

sizes = {name: "i32" for name in ("rows", "outputs", "inputs", "words", "groups")}
tensors = {"x": "*bf16", "out": "*bf16", "packed": "*i32", "scales": "*fp16", "zeros": "*u8", "g_idx": "*i32"}
fixed = {"GROUP": 64, "BITS": 3, "ORDERED": False, "M": 16, "N": 32, "K": 64}
for kernel in (kernels._multiply, kernels._dequantize):
    everything = {**tensors, **sizes, **dict.fromkeys(fixed, "constexpr")}
    known = {n: t for n, t in everything.items() if n in kernel.arg_names}
    source = ASTSource(kernel, known, constexprs={n: v for n, v in fixed.items() if n in known})
    print(sorted(triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with a torch for GPUs"
)
def test_the_interpreted_kernels_compute_the_formula():
    env = {**os.environ, "TRITON_INTERPRET": "1"}  # read when triton is imported: hence a process of its own
    done = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "same"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with a torch for GPUs"
)
def test_they_compile_for_a_gpu(tmp_path):
    """Without one: machine code comes out, which says nothing about what it computes."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("cubin") == 2
