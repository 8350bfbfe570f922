"""The CPU: what its costs are filed under, and how the kernels multiply bfloat16 on it."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch

INTEL = "-intel"


def instruction_set() -> str:
    """What costs are filed under: torch's name of it, with ``-amx`` or ``-bf16``, and ``-intel`` for Intel's CPUs.

    Torch's own products take another library's code, at another speed, on Intel's.
    """
    name = torch.backends.cpu.get_cpu_capability().lower()
    if name == "avx512" and torch.cpu._is_amx_tile_supported():
        name += "-amx"
    elif name == "avx512" and torch.cpu._is_avx512_bf16_supported():
        name += "-bf16"
    return name + (INTEL if is_intel() else "")


def pairs() -> str:
    """How products of bfloat16 are made in what Inductor compiles now.

    ``tiles``: by oneDNN's kernels, which use the CPU's tile registers (AMX), as torch's own attention does there.
    ``dots``: by dot products of pairs (AVX-512 BF16).  ``floats``: as float32, which is twice as fast as dot products
    on Intel's CPUs: they do one of 32 products every other cycle, and in the same time four multiply-adds of 16.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    isa = pick_vec_isa()
    if not isa or isa.bit_width() != 512 or not torch.cpu._is_avx512_bf16_supported():
        return "floats"
    if "amx_tile" in str(isa):
        return "tiles"
    return "floats" if is_intel() else "dots"


@functools.cache
def is_intel() -> bool:
    """Whether the CPU calls itself one of Intel's."""
    try:
        names = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        names = platform.processor()
    return "GenuineIntel" in names
