"""Kernels that quantize and dequantize matrices: `config.py` says which one serves a call, `kernel.py` is it."""
