"""Which Hopper kernels use the promise that an operand is constant; see `early`, which imports the DSL."""

from __future__ import annotations

from dataclasses import replace

from cutegemm.cute.hopper import options
from cutegemm.cute.hopper.config import HopperConfig
from cutegemm.problem import Signature
from cutegemm.problem.work import DENSE


def uses_constant(config: HopperConfig, signature: Signature) -> bool:
    """Whether kernels of this configuration load a constant operand before they wait for the kernel in front. Parts of
    fp32 operands never are constant: the kernel in front has just made them.
    """
    pdl = "pdl" in config.options and not config.solo
    return pdl and signature.work == DENSE and signature.parts is None


def for_constant(config: HopperConfig, signature: Signature) -> HopperConfig | None:
    """The configuration with option pdl, or None where the kernel makes no use of a constant operand."""
    if "pdl" not in config.options:
        with_pdl = options.read((*config.options, "pdl"))
        if with_pdl is None:
            return None
        config = replace(config, options=with_pdl)
    return config if uses_constant(config, signature) and options.why_excluded(config) is None else None
