"""The ladder of hand-written CUDA C++ kernels: one idea a file under `kernels/`, a registry, an NVRTC build, a backend.

    cutegemm.gemm(a, b, backend="legacy", config="warp_tile")

`legacy_cuda.rungs` lists the rungs, `legacy_cuda.config` says which parameters are valid, `legacy_cuda.build` compiles
one with NVRTC, `legacy_cuda.backend` puts it behind the library's call.
"""
