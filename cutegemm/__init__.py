"""cutegemm: GEMM kernels for NVIDIA GPUs."""
