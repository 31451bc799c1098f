"""The kernel family sm80: GEMM on the tensor cores by mma.sync (all types but fp64)."""
