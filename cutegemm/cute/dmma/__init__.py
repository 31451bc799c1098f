"""The kernel family dmma: GEMM in IEEE fp64 on the tensor cores, by mma.sync."""
