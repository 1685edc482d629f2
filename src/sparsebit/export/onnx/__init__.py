"""The ONNX graph: marks become nodes with types, and rewrites help the runtime find its integer kernels."""
