"""From a checked call to a launch.

runner         binds a plan to tensors of one description
arguments      the run-time arguments of a launch, by name
kernel_store   compiled kernels on disk; `source_digest` is part of their keys; `cache_dir`, where they lie
"""
