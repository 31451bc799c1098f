"""What the kernels without TMA share: copies from global memory into a ring of shared tiles."""
