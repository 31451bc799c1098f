"""The kernel family sm90: GEMM with TMA and WGMMA. Begin at `kernel`.

    config       configurations: their text form, their sizes in registers and shared memory; `validity` has their rules
    options      the table of a configuration's options: what each does, excludes and means to the tuner
    kernel       the host entry, and what a CTA sets up before its warps take roles
    producer, consumer, solo                 the roles
    work         which tiles a CTA computes, and which k tiles of each; `work_count` is the host's side
    operand      an operand's way from global memory into the ring; `pipeline` is the ring's barriers
    mma          WGMMA and the main loop
    sums         how a sum over K is settled: `cluster_sum`, `split_sum`, `stream_sum`, `tail_sum`, in a `workspace`
    store        from accumulators to D, with C and the bias (`terms`); `slab_store` for results that TMA cannot store,
                 `fragment` for single vectors, `reduce` for sums and maxima over rows and columns
    position, memory, output                 where a thread stands, shared memory, the addresses and sizes of D

What only some products need:

    ahead, ahead_plan                        matrix operands of the epilogue in the ring
    quantized_store                          results in 8 bits, with a scale for each 128 columns of a row
    early, constant                          operands that are loaded before the kernel in front has ended
    promoted, promotion                      fp8, and fp32 from parts: partial sums that are added in fp32 registers
    block_scales, direct_scales              scales of blocks of K, through the ring or loaded by the consumers
    grouping, grouped_work, groups, clip, gather    products in groups, whose sizes lie on the device

And for the choice of a configuration, without the DSL:

    candidates, shortlists, byte_candidates, part_candidates    what the heuristic compares
    footprint                                                   the cost model's view of a configuration

docs/hopper.md follows a tile through these files.
"""
