"""Analysis: reports on a quantized model. What is quantized, what it costs, which layers lose accuracy."""
