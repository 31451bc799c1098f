"""The architecture table, and devices described as torch describes them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cutegemm import arch as arch_table
from cutegemm.arch import ARCHS, Arch


def device(name="NVIDIA H200", major=9, minor=0, sms=132, **more):
    return SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=sms, **more)


def test_the_models_and_generic_entries_are_there():
    models = {"A100", "A6000", "RTX 4090", "H100 PCIe", "H100 SXM", "H200"}
    assert {a.name for a in ARCHS.values() if not a.generic} == models
    assert {a.name for a in ARCHS.values() if a.generic} == {"sm_80", "sm_86", "sm_89", "sm_90"}
    for arch in ARCHS.values():
        assert arch.smem_per_cta + arch.smem_reserved_per_cta == arch.smem_per_sm
        assert arch.warps_per_sm * 32 == arch.threads_per_sm
        assert hash(arch) == hash(arch_table.get(arch.name))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_peaks_follow_from_clock_and_units(name):
    # fp32: two flop per lane and clock. Vendors round, and quote tensor rates at another clock.
    for arch in ARCHS.values():
        lanes = {"float32": arch.fp32_lanes_per_sm, "bfloat16": {8: 1024, 9: 2048}[arch.capability[0]]}[name]
        if name == "bfloat16" and arch.capability in ((8, 6), (8, 9)):
            lanes = 256 if arch.name in ("RTX 4090", "sm_89") else 512
        ideal = 2 * lanes * arch.sm_count * arch.clock_mhz * 1e-6
        assert arch.peak(name) == pytest.approx(ideal, rel=0.09)


@pytest.mark.parametrize(
    ("text", "name"),
    [("h200", "H200"), ("rtx4090", "RTX 4090"), ("H100-PCIe", "H100 PCIe"), ("sm_90a", "sm_90"), ("SM80", "sm_80")],
)
def test_names_are_read_leniently(text, name):
    assert arch_table.get(text).name == name


def test_unknown_names_and_dtypes():
    with pytest.raises(ValueError, match="arch: 'B200' is not in the table; known: A100"):
        arch_table.get("B200")
    with pytest.raises(TypeError, match="arch: got int"):
        arch_table.get(90)
    with pytest.raises(ValueError, match="dtype: 'float8' has no peak rate on A100; known here: float32"):
        arch_table.get("A100").peak("float8")


def test_targets():
    assert [arch_table.get(n).target for n in ("A100", "A6000", "RTX 4090", "H200")] == [
        "sm_80",
        "sm_86",
        "sm_89",
        "sm_90a",
    ]


@pytest.mark.parametrize(
    ("printed", "capability", "name"),
    [
        ("NVIDIA H200", (9, 0), "H200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "H100 SXM"),
        ("NVIDIA H100 PCIe", (9, 0), "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "A100"),
        ("NVIDIA RTX A6000", (8, 6), "A6000"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "RTX 4090"),
    ],
)
def test_known_devices(printed, capability, name):
    entry = arch_table.get(name)
    found = arch_table.from_properties(device(printed, *capability, sms=entry.sm_count))
    assert found == entry


def test_a_slice_of_a_gpu_has_its_share_of_the_peak():
    found = arch_table.from_properties(device(sms=66, L2_cache_size=30 << 20))
    assert (found.sm_count, found.l2_bytes) == (66, 30 << 20)
    assert found.peak("float32") == pytest.approx(arch_table.get("H200").peak("float32") / 2)


def test_an_unknown_model_takes_the_limits_of_its_capability_and_of_the_device():
    found = arch_table.from_properties(device("NVIDIA A10", 8, 6, 72, shared_memory_per_block_optin=101376))
    assert (found.name, found.generic, found.ctas_per_sm, found.smem_per_cta) == ("NVIDIA A10", True, 16, 101376)
    later = arch_table.from_properties(device("NVIDIA RTX PRO 6000", 12, 0, 188, max_threads_per_multi_processor=1536))
    assert (later.capability, later.threads_per_sm, later.ctas_per_sm) == ((12, 0), 1536, 24)


def test_too_old_a_device_is_described_and_has_no_rates():
    found = arch_table.from_properties(device("Tesla T4", 7, 5, 40, shared_memory_per_block_optin=65536))
    assert (found.name, found.capability, found.sm_count, found.smem_per_cta) == ("Tesla T4", (7, 5), 40, 65536)
    assert found.target == "sm_75"
    with pytest.raises(ValueError, match="dtype: 'float32' has no peak rate on Tesla T4"):
        found.peak("float32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_no_device():
    with pytest.raises(RuntimeError, match="no CUDA device"):
        Arch.of_device()
