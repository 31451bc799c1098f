"""The kernel family sm90: GEMM with TMA and WGMMA. Begin at `kernel`.

    config       configurations: their text form, their rules, their sizes in registers and shared memory
    options      the table of a configuration's options: what each does, excludes and means to the tuner
    kernel       the host entry, and what a CTA sets up before its warps take roles
    producer, consumer, solo                 the roles
    work         which tiles a CTA computes, and which k tiles of each; `work_count` is the host's side
    operand      an operand's way from global memory into the ring; `pipeline` is the ring's barriers
    mma          WGMMA and the main loop
    sums         how a sum over K is settled: `cluster_sum`, `split_sum`, `stream_sum`, through a `workspace`
    store        from accumulators to D, with C and the bias (`terms`); `fragment` does so for single vectors
    position, memory, output                 where a thread stands, shared memory, what a launch says of D

docs/hopper.md follows a tile through these files.
"""
