"""Analysis: reports on a quantized model: its quantizers, its costs, and the layers that lose accuracy."""
