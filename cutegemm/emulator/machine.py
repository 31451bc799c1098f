"""The state of the CTAs that run together: registers, shared memory, program counters, and views on them.

A **wave** is a set of whole clusters that run at the same time. Every register is an array over (CTA, warp, lane)
of the wave. Warps that stand at the same program counter execute together, as one NumPy operation per
instruction over a **box**: a range of CTAs times a range of warps, with a mask where not every lane in the
range takes part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutegemm.emulator.launch import Launch
from cutegemm.emulator.memory import RANK_SHIFT, SHARED_BASE, Memory

#: numpy dtype of each code that generated programs use
DTYPES = {
    "u2": np.dtype(np.uint16), "i2": np.dtype(np.int16), "f2": np.dtype(np.float16),
    "u4": np.dtype(np.uint32), "i4": np.dtype(np.int32), "f4": np.dtype(np.float32),
    "u8": np.dtype(np.uint64), "i8": np.dtype(np.int64), "f8": np.dtype(np.float64),
    "u1": np.dtype(np.uint8), "i1": np.dtype(np.int8), "p": np.dtype(np.bool_),
}  # fmt: skip
BASE_CODE = {"16": "u2", "32": "u4", "64": "u8", "p": "p"}
#: register class of each code: that of the code of its size
CLASS_OF = {code: cls for cls, base in BASE_CODE.items() for code in DTYPES if code[-1] == base[-1]}
#: a program counter larger than any block: the warp has nothing to run
IDLE = 1 << 30


class Wave:
    """Registers, shared and local memory and program counters of the CTAs ``ctas`` (linear indices)."""

    def __init__(self, program: Any, launch: Launch, memory: Memory, ctas: np.ndarray, env: Any) -> None:
        self.program, self.launch, self.memory, self.env = program, launch, memory, env
        kernel = program.kernel
        bx, by, bz = launch.block
        threads = bx * by * bz
        self.ctas = ctas
        self.C, self.W = len(ctas), (threads + 31) // 32
        C, W = self.C, self.W
        shape = (C, W, 32)
        self.regs = {
            cls: np.zeros((count, *shape), DTYPES[BASE_CODE[cls]])
            for cls, count in kernel.register_counts.items()
            if cls in BASE_CODE
        }
        # threads and CTAs
        tid: np.ndarray = np.arange(W * 32, dtype=np.uint32).reshape(1, W, 32)
        self.live = np.broadcast_to(tid < threads, shape).copy()
        gx, gy, gz = launch.grid
        cx, cy, cz = launch.cluster
        self.cluster_size = cx * cy * cz
        # CTA order in the wave: clusters one after the other, CTAs of a cluster by rank
        x: np.ndarray = ctas % gx
        y: np.ndarray = (ctas // gx) % gy
        z: np.ndarray = ctas // (gx * gy)
        self.ctaid = (x, y, z)
        self.rank = ((x % cx) + (y % cy) * cx + (z % cz) * cx * cy).astype(np.int64)
        self.first = np.arange(C) - self.rank  # position in the wave of the cluster's rank 0
        u4 = np.uint32
        per_cta = lambda v: np.asarray(v, u4).reshape(C, 1, 1)  # noqa: E731
        scalar: Any = lambda v: np.full((1, 1, 1), v, u4)  # noqa: E731
        self.special = {
            "tid.x": tid % bx, "tid.y": (tid // bx) % by, "tid.z": tid // (bx * by),
            "ntid.x": scalar(bx), "ntid.y": scalar(by), "ntid.z": scalar(bz),
            "ctaid.x": per_cta(x), "ctaid.y": per_cta(y), "ctaid.z": per_cta(z),
            "nctaid.x": scalar(gx), "nctaid.y": scalar(gy), "nctaid.z": scalar(gz),
            "laneid": tid & 31, "warpid": tid >> 5, "nwarpid": scalar(W),
            "lanemask_eq": u4(1) << (tid & 31), "lanemask_lt": (u4(1) << (tid & 31)) - u4(1),
            "lanemask_le": ((u4(1) << (tid & 31)) << u4(1)) - u4(1),
            "clusterid.x": per_cta(x // cx), "clusterid.y": per_cta(y // cy), "clusterid.z": per_cta(z // cz),
            "nclusterid.x": scalar(gx // cx), "nclusterid.y": scalar(gy // cy), "nclusterid.z": scalar(gz // cz),
            "cluster_ctaid.x": per_cta(x % cx), "cluster_ctaid.y": per_cta(y % cy), "cluster_ctaid.z": per_cta(z % cz),
            "cluster_nctaid.x": scalar(cx), "cluster_nctaid.y": scalar(cy), "cluster_nctaid.z": scalar(cz),
            "cluster_ctarank": per_cta(self.rank), "cluster_nctarank": scalar(self.cluster_size),
            "is_explicit_cluster": np.full((1, 1, 1), self.cluster_size > 1),
            "smid": per_cta(np.arange(C) % 132), "nsmid": scalar(132), "gridid": scalar(1),
            "dynamic_smem_size": scalar(launch.dynamic_smem),
            "total_smem_size": scalar(program.static_shared + launch.dynamic_smem),
            "aggr_smem_size": scalar(program.static_shared + launch.dynamic_smem),
        }  # fmt: skip
        eq, lt = self.special["lanemask_eq"], self.special["lanemask_lt"]
        self.special["lanemask_ge"] = ~lt
        self.special["lanemask_gt"] = ~(lt | eq)
        # shared memory: one row a CTA, a multiple of 16 bytes
        self.smem_bytes = program.dynamic_offset - SHARED_BASE + launch.dynamic_smem
        self.smem_row = max(16, (self.smem_bytes + 15) // 16 * 16)
        raw = np.zeros(C * self.smem_row + 16, np.uint8)
        skip = -raw.ctypes.data % 16
        flat = raw[skip : skip + C * self.smem_row]
        env.poison(flat)
        self.smem = {1: flat, 2: flat.view(np.uint16), 4: flat.view(np.uint32), 8: flat.view(np.uint64),
                     16: flat.view(np.complex128)}  # fmt: skip
        self.shared_symbol_base = per_cta(self.rank << RANK_SHIFT)
        self.local_row = (program.local_bytes + 15) // 16 * 16
        local = np.zeros(C * W * 32 * self.local_row, np.uint8)
        self.local = {n: local.view(dt) for n, dt in
                      ((1, np.uint8), (2, np.uint16), (4, np.uint32), (8, np.uint64), (16, np.complex128))}  # fmt: skip
        # program counters. A warp whose lanes stand together has its pc in `wpc`; one that is split has a pc and a
        # waiting flag per lane, and `wpc` is the smallest pc of the lanes that can run.
        self.wpc = np.where(self.live.any(-1), 0, IDLE).astype(np.int64)
        self.split: np.ndarray = np.zeros((C, W), bool)
        self.lane_pc: np.ndarray = np.zeros(shape, np.int64)
        self.lane_wait: np.ndarray = np.zeros(shape, bool)
        self.full = bool(self.live.all())
        self.gone: np.ndarray = np.zeros(self.C, bool)  # CTAs of which no thread is left
        self.any_gone = False
        self.boxes: dict[tuple[int, int, int, int], Box] = {}
        self.carry: np.ndarray | None = None
        self.fma_tables: dict[int, np.ndarray] = {}
        self.now = 1

    def box(self, c0: int, c1: int, w0: int, w1: int) -> Box:
        key = (c0, c1, w0, w1)
        found = self.boxes.get(key)
        if found is None:
            if len(self.boxes) > 256:
                self.boxes.clear()
            found = self.boxes[key] = Box(self, *key)
        return found

    # -- program counters -------------------------------------------------------------------------------------
    def settle(self, c: np.ndarray, w: np.ndarray) -> None:
        """Recompute `wpc` and `split` of the warps (c, w) from their lane counters."""
        live = self.live[c, w]
        waits = self.lane_wait[c, w]
        pcs = self.lane_pc[c, w]
        wpc = np.where(live & ~waits, pcs, IDLE).min(-1)
        self.wpc[c, w] = wpc
        self.split[c, w] = (live & (waits | (pcs != wpc[:, None]))).any(-1)

    def spread(self, box: Box) -> None:
        """Write the common counters of unsplit warps of a box into their lanes, before lanes part ways."""
        s = box.at
        whole = ~self.split[s]
        if whole.any():
            lanes = self.lane_pc[s]
            lanes[whole] = self.wpc[s][whole][:, None]
            self.lane_wait[s][whole] = False
            self.split[s] = True

    def settle_box(self, box: Box) -> None:
        c, w = np.nonzero(np.ones((box.c1 - box.c0, box.w1 - box.w0), bool))
        self.settle(c + box.c0, w + box.w0)


class Box:
    """The registers of CTAs c0:c1, warps w0:w1, as lists of views: ``box.u4[5]`` is register 5 of class 32."""

    def __init__(self, wave: Wave, c0: int, c1: int, w0: int, w1: int) -> None:
        self.wave = wave
        self.c0, self.c1, self.w0, self.w1 = c0, c1, w0, w1
        self.at = (slice(c0, c1), slice(w0, w1))
        self.shape = (c1 - c0, w1 - w0, 32)
        self.warps = (c1 - c0) * (w1 - w0)
        self.lanes = self.warps * 32
        self._special: dict[tuple[str, str], np.ndarray] = {}
        self.mask: np.ndarray | None = None  # lanes of the block that is running; None when all
        self._cache: dict = {}

    def __getattr__(self, name: str):
        if name in CLASS_OF:  # the lists of register views are built when a program first asks for them
            rows = list(self.wave.regs[CLASS_OF[name]].view(DTYPES[name])[:, self.c0 : self.c1, self.w0 : self.w1])
            setattr(self, name, rows)
            return rows
        raise AttributeError(name)

    def sreg(self, name: str, code: str) -> np.ndarray:
        key = (name, code)
        found = self._special.get(key)
        if found is None:
            array = self.wave.special[name]
            if array.shape[0] > 1:
                array = array[self.c0 : self.c1]
            if array.shape[1] > 1:
                array = array[:, self.w0 : self.w1]
            found = self._special[key] = np.ascontiguousarray(array).astype(DTYPES[code])
        return found

    def shared_symbol(self, offset: int, code: str) -> np.ndarray:
        key = (f"shared{offset}", code)
        found = self._special.get(key)
        if found is None:
            base = self.wave.shared_symbol_base[self.c0 : self.c1]
            found = self._special[key] = (base + np.uint32(offset)).astype(DTYPES[code])
        return found

    def cached(self, key: str, make):
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = make()
        return found

    # -- indices of lanes and warps, flat over the wave ---------------------------------------------------------
    def warps_of(self, lanes: np.ndarray | None) -> np.ndarray:
        """`warp_of_lane` of flat lanes of the box; None for all."""
        warps = self.warp_of_lane.reshape(-1)
        return warps if lanes is None else warps[lanes]

    @property
    def cta_of_lane(self) -> np.ndarray:
        """Position in the wave of each lane's CTA, shape of the box, int64."""
        return self.cached(
            "cta", lambda: np.broadcast_to(np.arange(self.c0, self.c1).reshape(-1, 1, 1), self.shape).copy()
        )

    @property
    def warp_of_lane(self) -> np.ndarray:
        """CTA position * W + warp of each lane."""
        return self.cached(
            "warp", lambda: self.cta_of_lane * self.wave.W + np.arange(self.w0, self.w1).reshape(1, -1, 1)
        )

    @property
    def lane_ids(self) -> np.ndarray:
        return self.cached("lanes", lambda: np.broadcast_to(np.arange(32), self.shape))

    def where(self, lane: int) -> str:
        """The CTA and thread of a flat lane index of the box, for messages."""
        c, w, l = np.unravel_index(lane, self.shape)
        return self.wave.env.thread_name(self.wave, int(c) + self.c0, int(w) + self.w0, int(l))
