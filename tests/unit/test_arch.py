"""The architecture table, and devices described as torch describes them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from cutegemm.choice import plan
from cutegemm.hardware import arch as arch_table
from cutegemm.hardware.arch import ARCHS, Arch
from cutegemm.problem import Problem


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
        fp32_lanes = 64 if arch.capability == (8, 0) else 128
        lanes = {"float32": fp32_lanes, "bfloat16": {8: 1024, 9: 2048}[arch.capability[0]]}[name]
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


DEVICES = [
    # name that the driver prints, capability, SMs, MiB of memory, MHz of its clock, bits of its bus; model, similar to
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, 81559, 2619, 5120, "H100 SXM", ""),
    ("NVIDIA H100 PCIe", (9, 0), 114, 81559, 1593, 5120, "H100 PCIe", ""),
    ("NVIDIA H100 NVL", (9, 0), 132, 95830, 2619, 6016, None, "H100 SXM"),
    ("NVIDIA H200", (9, 0), 132, 143771, 3201, 6144, "H200", ""),
    ("NVIDIA H200 NVL", (9, 0), 132, 143771, 3201, 6144, None, "H200"),
    ("NVIDIA GH200 480GB", (9, 0), 132, 97871, 2619, 6144, None, "H100 SXM"),
    ("NVIDIA GH200 144G HBM3e", (9, 0), 132, 147456, 3201, 6144, None, "H200"),
    ("NVIDIA H20", (9, 0), 78, 97871, 2619, 6144, None, "sm_90"),
    ("NVIDIA H800", (9, 0), 132, 81559, 2619, 5120, None, "H100 SXM"),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40960, 1215, 5120, None, "sm_80"),
    ("NVIDIA A100-PCIE-40GB", (8, 0), 108, 40960, 1215, 5120, None, "sm_80"),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 81920, 1593, 5120, "A100", ""),
    ("A100-SXM4-80GB", (8, 0), 108, 81251, 1593, 5120, "A100", ""),
    ("NVIDIA A100 80GB PCIe", (8, 0), 108, 81920, 1512, 5120, None, "A100"),
    ("NVIDIA A800-SXM4-80GB", (8, 0), 108, 81920, 1593, 5120, None, "A100"),
    ("NVIDIA A30", (8, 0), 56, 24576, 1215, 3072, None, "sm_80"),
    ("NVIDIA A10", (8, 6), 72, 23028, 6251, 384, None, "sm_86"),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82, 24576, 9751, 384, None, "sm_86"),
    ("NVIDIA RTX A6000", (8, 6), 84, 49140, 8001, 384, "A6000", ""),
    ("NVIDIA RTX A6000", (8, 6), 84, 46068, 8001, 384, "A6000", ""),  # with error correction
    ("NVIDIA L4", (8, 9), 58, 23034, 6251, 192, None, "sm_89"),
    ("NVIDIA L40", (8, 9), 142, 46068, 9001, 384, None, "sm_89"),
    ("NVIDIA L40S", (8, 9), 142, 46068, 9001, 384, None, "sm_89"),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 49140, 10001, 384, None, "sm_89"),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 24564, 10501, 384, "RTX 4090", ""),
    ("NVIDIA GeForce RTX 4090 D", (8, 9), 114, 24564, 10501, 384, None, "RTX 4090"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 76, 16376, 9001, 256, None, "RTX 4090"),
    ("NVIDIA B200", (10, 0), 148, 183359, 3996, 7680, None, "sm_90"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 16, 10240, 2619, 5120, None, "H100 SXM"),
    ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 42, 40448, 1593, 5120, None, "A100"),
    # The name of a model, and something else than that model.
    ("NVIDIA H200", (9, 0), 66, 143771, 3201, 6144, None, "H200"),
    ("NVIDIA H200", (9, 0), 132, 81559, 3201, 6144, None, "H200"),
    ("NVIDIA H200", (9, 0), 132, 143771, 2619, 5120, None, "H200"),
    ("NVIDIA H200", (8, 0), 132, 143771, 3201, 6144, None, "sm_80"),
]  # fmt: skip


@pytest.mark.parametrize(("printed", "capability", "sms", "mib", "mhz", "bits", "model", "similar"), DEVICES)
def test_a_device_is_a_model_of_the_table_or_only_similar_to_one(
    printed, capability, sms, mib, mhz, bits, model, similar
):
    reported = {"total_memory": mib << 20, "memory_clock_rate": 1000 * mhz, "memory_bus_width": bits}
    found = arch_table.from_properties(device(printed, *capability, sms=sms, **reported))
    if model is not None:
        assert found == arch_table.get(model)
        assert found.remark == ""
        return
    base = arch_table.get(similar)
    assert (found.name, found.generic, found.similar, found.sm_count) == (printed, True, base.name, sms)
    assert found.capability == capability
    assert found.peak("float16") == pytest.approx(base.peak("float16") * sms / base.sm_count)
    if "MIG" not in printed:
        assert found.hbm_bytes_per_s == pytest.approx(2e6 * mhz * bits / 8)
    assert printed in found.remark
    assert f"similar to {base.name}" in found.remark


def test_a_mig_slice_has_the_bandwidth_of_its_memory():
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    with_memory = arch_table.from_properties(device(name, sms=16, total_memory=10 << 30))
    assert with_memory.hbm_bytes_per_s == pytest.approx(arch_table.get("H100 SXM").hbm_bytes_per_s / 8)
    without = arch_table.from_properties(device(name, sms=16))
    assert without.hbm_bytes_per_s == pytest.approx(arch_table.get("H100 SXM").hbm_bytes_per_s * 16 / 132)


def test_a_similar_device_has_rates_at_its_own_clock():
    found = arch_table.from_properties(device("NVIDIA H200 NVL", clock_rate=1785000))
    assert found.clock_mhz == 1785
    assert found.peak("bfloat16") == pytest.approx(arch_table.get("H200").peak("bfloat16") * 1785 / 1980)


def test_explain_says_that_a_gpu_is_only_similar_to_a_known_one():
    problem = Problem.of(512, 512, 512)
    for name, expected in (("NVIDIA GH200 480GB", True), ("NVIDIA H200", False)):
        here = arch_table.from_properties(device(name))
        choice = plan.choose(problem, here, "cute", "sm80/128x128x32/w64x64/s4/g8")
        text = plan.describe(plan.Plan(problem, choice, here, kernel=object()))
        assert ("is not in the table of GPUs: it counts as similar to H100 SXM" in text) is expected


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


def test_equal_gpus_hash_alike_and_parts_of_one_do_not():
    for name in ("H200", "A100", "sm_90"):
        entry = arch_table.get(name)
        assert hash(dataclasses.replace(entry)) == hash(entry)
        assert hash(dataclasses.replace(entry, sm_count=entry.sm_count // 2)) != hash(entry)
        assert dataclasses.replace(entry, l2_bytes=1) != entry


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_no_device():
    with pytest.raises(RuntimeError, match="no CUDA device"):
        Arch.of_device()
