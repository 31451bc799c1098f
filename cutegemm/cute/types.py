"""Our dtype names as CuTe DSL numeric types."""

from __future__ import annotations

import cutlass

NUMERIC = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
