"""The search for the fastest configuration of a shape: `python -m tuning.sweep` and `cutegemm.tune` run it.

space          every valid configuration of the backends; `search` says which to try next
compile_pool   processes that compile, `child` what one of them runs
gpu_process    the process that owns a GPU, checks and times; `timer` is its client, `timing` the method
budget         what of the time counts; `report` what is shown; `run` puts all together for shapes and GPUs
"""
