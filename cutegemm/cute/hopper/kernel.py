"""GEMM on Hopper: TMA -> ring of shared tiles -> WGMMA, by warps with roles. Operands have 16 or 8 bits, or are fp32
numbers taken as tf32 or as sums of parts.

    warpgroup W (last)   its first warp loads: TMA brings k tiles of A and B into the ring     `producer`
    warpgroups 0 .. W-1  multiply (WGMMA reads shared memory itself) and store their rows      `consumer`

The other warps of warpgroup W end, unless they copy scales of blocks (`block_scales`) or gathered rows (`gather`).

A CTA stays and computes tile after tile. Both roles walk the same works (`work`) in the same order and meet only at the
barriers of the ring (`pipeline`), so that the loads of the next tile run under the last multiplications and the
epilogue of this one:

    producer     | load tile 0 .......... | load tile 1 ..........      | load tile 2 ...
    cooperative    | WGMMA tile 0 ......... | store | WGMMA tile 1 .........| store |
    ping-pong  0   | WGMMA tile 0 | store          | WGMMA tile 2 | store
               1                  | WGMMA tile 1 | store            | WGMMA tile 3 |

Cooperative warpgroups share a tile by blocks of 64 rows. In ping-pong each has a tile of its own, and one stores while
the other multiplies. One WGMMA group is kept in flight: a stage is released when the group of the next one has been
issued (`mma`). The first WGMMA of a tile overwrites the accumulators.

In a cluster of CM x CN CTAs the CTAs of a row need the same tile of A: each loads a share and multicasts it to the
row, and likewise B along the columns (`operand`). So every CTA's full barrier counts whole tiles, whoever sent them.

Where K is divided among CTAs, `sums` says how they add up their parts: through a workspace or through distributed
shared memory. The epilogue adds C and the bias in registers and stores by TMA wherever D allows (`store`).

Edges: TMA writes zeros for what lies beyond the operands; the epilogue stores what lies in D. With K = 0 a tile has one
k tile beyond K, which is loaded as zeros.

docs/hopper.md follows a tile from one end to the other: roles, barriers, phases, timeline.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cutegemm.cute import types
from cutegemm.cute.entry import Gemm
from cutegemm.cute.hopper import grouping
from cutegemm.cute.hopper.block_scales import ScaleProducer, make_products
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.cute.hopper.constant import uses_constant
from cutegemm.cute.hopper.consumer import Consumer
from cutegemm.cute.hopper.early import EarlyProducer, is_constant
from cutegemm.cute.hopper.gather import GatherLoader, GatherProducer
from cutegemm.cute.hopper.grouped_work import make_work
from cutegemm.cute.hopper.memory import SharedMemory
from cutegemm.cute.hopper.operand import Operand, loaders
from cutegemm.cute.hopper.output import Output
from cutegemm.cute.hopper.pipeline import Ring, Turns
from cutegemm.cute.hopper.position import Position
from cutegemm.cute.hopper.producer import Producer
from cutegemm.cute.hopper.promotion import copies, registers, shares_factors
from cutegemm.cute.hopper.reuse import keep_factors
from cutegemm.cute.hopper.solo import Solo
from cutegemm.cute.hopper.stores import make_store
from cutegemm.cute.hopper.sums import make_sums, narrowed
from cutegemm.cute.splitter import Splitter, matrices
from cutegemm.problem import Signature
from cutegemm.problem.work import GATHERED
from cutegemm.run import arguments


class HopperGemm(Gemm):
    """The Hopper kernel in the DSL: the host entry, and what a CTA sets up before its warps take roles."""

    def __init__(self, config: HopperConfig, signature: Signature) -> None:
        self.config = config
        self.signature = signature
        # "a" and "b" are the WGMMA's operands: those of the problem, or exchanged.
        k_major = (signature.a_major == "k", signature.b_major == "k")
        a_k_major, b_k_major = reversed(k_major) if config.swapped else k_major
        dtypes, count = [types.NUMERIC[name] for name in signature.dtypes], 1
        halves = signature.epilogue.gating == "halves"
        self.splitter = None if signature.parts is None else Splitter(signature, signature.parts)
        if signature.parts is not None:
            dtypes, count = [types.NUMERIC[signature.parts.element]] * 2, signature.parts.count
            a_k_major = b_k_major = True
        a_dtype, b_dtype = reversed(dtypes) if config.swapped else dtypes
        groups = grouping.of(config, signature.work)
        of_a, of_b = groups.of_operand("row"), groups.of_operand("column")
        (halves_a, halves_b), (cm, cn) = (halves and config.swapped, halves and not config.swapped), config.cluster
        self.a = Operand(config, a_dtype, config.bm, cn, a_k_major, halves_a, of_a, count)
        self.b = Operand(config, b_dtype, config.bn, cm, b_k_major, halves_b, of_b, count)
        self.gathers = signature.work == GATHERED
        self.work = make_work(config, signature)
        self.ring = Ring(config, signature)
        self.turns = Turns()
        self.products = make_products(config, signature, self.ring, self.turns)
        copied = copies(config, signature) > 0
        self.scales: Any = ScaleProducer(config, signature, self.ring, self.work) if copied else None
        self.registers: Any = registers(config, signature)
        self.store = make_store(config, signature)
        self.sums = make_sums(config, signature, self.store)
        self.narrow = [(n, narrowed(config, signature, self.store, n)) for n in config.widths()[:-1]]
        self.ahead: Any = self.store.ahead if config.through_ring(signature) is not None else None
        # Which operands no running kernel writes, where the kernel makes use of it.
        self.constant = is_constant(config, signature) if uses_constant(config, signature) else (False, False)

    def finish(self, cubin: bytes) -> bytes:
        """Changes the machine code that the compiler made (`compile.compile_operator`)."""
        return keep_factors(cubin) if shares_factors(self.config, self.signature) else cubin

    # -- host -------------------------------------------------------------------------------------------------------
    def launch(self, args) -> None:
        """Launches the kernel. `args`: the host entry's arguments by name."""
        config = self.config
        cm, cn = config.cluster
        left = (args.a, args.m, args.lda, args.a_batch)
        right = (args.b, args.n, args.ldb, args.b_batch)
        (a, rows, lda, a_batch), (b, columns, ldb, b_batch) = (right, left) if config.swapped else (left, right)
        if cutlass.const_expr(self.splitter is None):
            atom_a, tensor_a = self.a.load_atom(a, rows, args.k, lda, a_batch, args.batch)
            atom_b, tensor_b = self.b.load_atom(b, columns, args.k, ldb, b_batch, args.batch)
        else:
            (atom_a, tensor_a), (atom_b, tensor_b) = self._load_parts(args)
        stores = self.store.make_atoms(args)
        if cutlass.const_expr(self.ahead is not None):
            stores = (*stores, *self.ahead.make_atoms(args))
        host_only = ("a", "b", "stream", "lda", "ldb", "a_batch", "b_batch", *self._lines)
        on_device = arguments.device(
            args,
            host_only=host_only if not self.gathers else tuple(each for each in host_only if each not in ("a", "lda")),
            tiles_m=cute.ceil_div(rows, config.bm * cm),
            tiles_n=cute.ceil_div(columns, config.bn * cn),
            wgmma_a_batch=a_batch,
            wgmma_b_batch=b_batch,
        )
        self.kernel(atom_a, tensor_a, atom_b, tensor_b, stores, on_device).launch(
            grid=(args.clusters * config.cluster_ctas, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_ctas, 1, 1),
            min_blocks_per_mp=1,
            stream=args.stream,
            use_pdl="pdl" in config.options,
        )

    def arguments(self) -> tuple[arguments.Argument, ...]:
        return arguments.host(self.signature, (*self.config.extra_arguments, *self._lines))

    @property
    def _lines(self) -> tuple[str, ...]:
        """The further arguments of the host entry where operands are split into parts."""
        return () if self.splitter is None else ("operand_lines",)

    def _load_parts(self, args) -> tuple[tuple, tuple]:
        """Splits the operands into parts; returns the TMA atoms and tensors of the parts, in the WGMMA's order."""
        assert self.splitter is not None
        sides = self.splitter.launch(args)
        sides = sides[::-1] if self.config.swapped else sides
        loads = []
        for operand, (pointer, rows, leading, stride, count) in zip((self.a, self.b), sides, strict=True):
            loads.append(operand.load_atom(pointer, rows, args.k, leading, stride, count))
        return loads[0], loads[1]

    # -- device -----------------------------------------------------------------------------------------------------
    @cute.kernel
    def kernel(
        self,
        atom_a: cute.CopyAtom,
        tensor_a: cute.Tensor,
        atom_b: cute.CopyAtom,
        tensor_b: cute.Tensor,
        stores,
        args,
    ):
        """One CTA: set up the barriers, then take a role."""
        config = self.config
        position = Position.here(config)
        self.work.start(position, args)
        results = len(stores) if self.ahead is None else len(self.signature.results)
        output = Output(args, stores[:results])

        memory = SharedMemory(config, self.signature)
        self.ring.start(memory.barriers, position)
        self.turns.start(memory.turns)
        each_a = each_b = None
        if cutlass.const_expr(self.splitter is not None):
            each_a, each_b = (matrices(args.batch, stride) for stride in (args.wgmma_a_batch, args.wgmma_b_batch))
        self.a.start(atom_a, tensor_a, args.wgmma_a_batch, memory.ring, each_a)
        self.b.start(atom_b, tensor_b, args.wgmma_b_batch, memory.ring + self.a.ring_bytes, each_b)
        if cutlass.const_expr(self.ahead is not None):
            self.ahead.start(stores[results:], memory, self.ring, position, args)
        if position.warp == 0:
            self.a.prefetch()
            self.b.prefetch()
            with cute.arch.elect_one():
                self.ring.initialize()
                if cutlass.const_expr(config.ping_pong):
                    self.turns.initialize()
                self.sums.initialize(memory)
                if cutlass.const_expr(self.ahead is not None):
                    self.ahead.initialize()
            cute.arch.mbarrier_init_fence()
        self._meet()
        if cutlass.const_expr(any(self.constant)):  # noqa: SIM102
            if position.warp == config.consumers * 4:
                self._producer(position).fetch()
        if cutlass.const_expr("pdl" in config.options):
            # Nothing before this line reads or writes what an earlier kernel may still be working on. The one thing
            # fetched above is an operand of which the call promises that no running kernel writes it.
            cute.arch.griddepcontrol_wait()
            # The CTAs of the next kernel may start on an SM as CTAs of this one end; they wait in the same way.
            cute.arch.griddepcontrol_launch_dependents()
        self.work.read()

        if cutlass.const_expr(config.solo):
            self.sums.start(output, memory, position, self.work)
            self.products.start(self.a, self.b, position, args, self.work, memory)
            load_a, load_b = loaders(config, position, self.a, self.b)
            Solo(position, self.ring, self.work, load_a, load_b, self.products, self.sums).run()
        else:
            if position.group == config.consumers:
                if cutlass.const_expr(self.registers is not None):
                    cute.arch.setmaxregister_decrease(self.registers[0])
                if cutlass.const_expr(self.gathers):
                    rows = self.b if config.swapped else self.a
                    load_other = loaders(config, position, self.a, self.b)[0 if config.swapped else 1]
                    first = position.warp == config.consumers * 4
                    gathered = GatherLoader(rows, position, args)
                    if cutlass.const_expr(self.scales is not None):
                        self.scales.start(args, memory, position)
                    GatherProducer(self.ring, self.work, gathered, load_other, config.swapped, first, self.scales).run()
                elif position.warp == config.consumers * 4:
                    self._producer(position).run()
                elif cutlass.const_expr(self.scales is not None):
                    self.scales.start(args, memory, position)
                    self.scales.run()
            else:
                if cutlass.const_expr(self.registers is not None):
                    cute.arch.setmaxregister_increase(self.registers[1])
                for sums in (self.sums, *(sums for _, sums in self.narrow)):
                    sums.start(output, memory, position, self.work)
                self.products.start(self.a, self.b, position, args, self.work, memory)
                work = self.work.of_warpgroup(position.group)
                Consumer(
                    config, position.group, work, self.turns, self.products, self.sums, self.ahead, self.narrow
                ).run()

    def _producer(self, position: Position) -> Any:
        """The role of the warp that asks TMA for tiles."""
        load_a, load_b = loaders(self.config, position, self.a, self.b)
        if any(self.constant):
            return EarlyProducer(self.ring, self.work, load_a, load_b, self.ahead, self.constant)
        return Producer(self.ring, self.work, load_a, load_b, self.ahead)

    def _meet(self) -> None:
        """All threads of the cluster see the barriers initialized."""
        if self.config.cluster_ctas > 1:
            # The arrival may be relaxed: the fence behind the initialization has made the barriers visible.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
