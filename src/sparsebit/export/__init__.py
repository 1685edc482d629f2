"""Export: module -> ONNX -> certificate. Knows grids and marks, not the quantizers that make them.

plain.py       any nn.Module: exported, run, compared
marks.py       a quantizer's place in the exported graph, by name
to_onnx.py     torch's exporter, with the marks in it
backends/      what a runtime wants the marks to become, one file each
end_to_end.py  the file against the model, and the model against itself: its noise floor
certify.py     a quantized file is also compared quantizer by quantizer
"""
