"""Export: module -> ONNX -> certificate. Knows grids and marks, not the quantizers that make them.

export_module.py  any nn.Module: exported, run, compared
onnx/             torch's exporter, the marks of quantizers in its graph, and lowering for a runtime
backends/         one file per runtime: the grids that it holds, and the form of its files
kernels/          integer kernels of onnxruntime: the ops without one, and kernels that compute wrongly
certificate/      the file is run and compared with the model, end to end and quantizer by quantizer
"""
