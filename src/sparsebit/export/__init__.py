"""Export: marks -> ONNX -> certificate. Knows grids and marks, not the quantizers that make them.

marks.py    a quantizer's place in the exported graph, by name
to_onnx.py  torch's exporter, with the marks in it
backends/   what a runtime wants the marks to become, one file each
certify.py  the file is run and compared before anybody gets it
"""
