"""Our names of element types as CuTe DSL numeric types: dtypes, and the integers of device arrays."""

from __future__ import annotations

import cutlass

from cutegemm.problem.dtypes import OUTPUTS
from cutegemm.problem.work import INTEGERS

NUMERIC = {name: getattr(cutlass, row.dsl) for name, row in OUTPUTS.items()}
NUMERIC |= {name: getattr(cutlass, name.capitalize()) for name in INTEGERS}
