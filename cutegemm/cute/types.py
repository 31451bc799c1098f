"""Our names of element types as CuTe DSL numeric types: dtypes, and the integers of device arrays."""

from __future__ import annotations

import cutlass

from cutegemm.problem.dtypes import TYPES
from cutegemm.problem.work import INTEGERS

NUMERIC = {name: getattr(cutlass, row.dsl) for name, row in TYPES.items()}
NUMERIC |= {name: getattr(cutlass, name.capitalize()) for name in INTEGERS}
