"""Facts about the kernels of onnxruntime: which ops run in integers, and which kernels are wrong."""
