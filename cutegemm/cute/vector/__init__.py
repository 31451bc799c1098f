"""The kernel family vector: products with a result of few rows or few columns, in fp32, at the memory's speed."""
