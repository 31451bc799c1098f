"""How many clusters of CTAs a GPU holds at a time.

The CTAs of a cluster run in one GPC. GPCs of one chip differ in their SMs, and where their number is no multiple of the
cluster's size some idle: an H200 of 132 SMs has room for 30 clusters of four, not 33. A persistent grid of more
clusters than fit would compute the tiles of the last ones after all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cutegemm.errors import GemmError
from cutegemm.hardware.arch import Arch

_EMPTY_KERNEL = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry empty() { ret; }
\0"""
_SMEM_BYTES = 120 * 1024
"""More than half an SM's: one CTA an SM, as our kernels have it."""


def resident_clusters(arch: Arch, size: int) -> int:
    """Clusters of `size` CTAs, one CTA an SM, that run at a time.

    Asked of the driver where this process uses that GPU; else `Arch.clusters`, or what the number of SMs allows.
    """
    by_sms = max(arch.sm_count // size, 1)
    # The two SMs of a TPC are never apart.
    if size <= 2:
        return by_sms
    if not _is_in_use(arch):
        return min(by_sms, dict(arch.clusters).get(size, by_sms))
    return max(1, min(by_sms, _asked(torch._C._cuda_getDevice(), size)))


def _is_in_use(arch: Arch) -> bool:
    if not torch.cuda.is_initialized():
        return False
    # A new shape asks this a few times: torch.cuda.current_device() and a comparison of all fields take microseconds.
    current = Arch.of_device(torch._C._cuda_getDevice())
    return current is arch or current == arch


@functools.cache
def _asked(device: int, size: int) -> int:
    """What cuOccupancyMaxActiveClusters says. The calling thread need not have used the device before."""
    from cuda.bindings import driver

    def checked(answer: tuple):
        if answer[0] != driver.CUresult.CUDA_SUCCESS:
            raise GemmError(f"the CUDA driver answered {answer[0]} when asked about clusters of {size}")
        return answer[1] if len(answer) > 1 else None

    device = checked(driver.cuDeviceGet(device))
    checked(driver.cuCtxPushCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
    # Loading a module would end a CUDA graph capture under way; it touches no stream.
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        return _answer(driver, checked, size)
    finally:
        checked(driver.cuThreadExchangeStreamCaptureMode(before))
        checked(driver.cuCtxPopCurrent())
        checked(driver.cuDevicePrimaryCtxRelease(device))


def _answer(driver: Any, checked: Callable[[tuple], Any], size: int) -> int:
    module = checked(driver.cuModuleLoadData(_EMPTY_KERNEL))
    try:
        kernel = checked(driver.cuModuleGetFunction(module, b"empty"))
        most_smem = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(kernel, most_smem, _SMEM_BYTES))
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = size, 1, 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 384, 1, 1
        config.sharedMemBytes = _SMEM_BYTES
        config.attrs, config.numAttrs = [attribute], 1
        return checked(driver.cuOccupancyMaxActiveClusters(kernel, config))
    finally:
        driver.cuModuleUnload(module)
