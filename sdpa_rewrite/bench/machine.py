"""What a figure depends on besides the code."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def describe() -> dict[str, str]:
    """The machine, torch and threads."""
    return {
        "machine": f"{_cpu()}, {torch.backends.cpu.get_cpu_capability()}{_dot_products()}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }


def _flags() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cpu() -> str:
    return _flags().get("model name") or platform.processor() or platform.machine()


def _dot_products() -> str:
    flags = _flags().get("flags", "").split()
    named = {"avx512_bf16": "bf16 dot products", "amx_tile": "AMX"}
    found = [text for flag, text in named.items() if flag in flags]
    return f" with {' and '.join(found)}" if found else ""
