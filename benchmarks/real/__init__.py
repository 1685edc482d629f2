"""Parts of benchmarks/real_networks.py: networks with real weights, the tools that quantize them, and the scores."""
