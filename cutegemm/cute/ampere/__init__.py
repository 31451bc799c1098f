"""The kernel family sm80: GEMM on the tensor cores by mma.sync (fp16, bf16, fp32 as tf32, int8, fp8)."""
