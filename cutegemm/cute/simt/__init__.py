"""The kernel family simt: fp32 GEMM on CUDA cores, also with sliced K."""
