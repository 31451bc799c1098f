"""The GPU that the emulator pretends to be."""

from __future__ import annotations

from dataclasses import replace

from cutegemm.choice import plan
from cutegemm.hardware import arch as arch_table


def gpu_of(sms: int, monkeypatch, name: str = "sm_90a") -> None:
    """So many SMs of that architecture, for the rest of the test."""
    arch = replace(arch_table.get(name), sm_count=sms)
    monkeypatch.setattr(plan, "emulated_arch", lambda: arch)
