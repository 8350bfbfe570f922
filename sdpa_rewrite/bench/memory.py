"""Peak memory of a call: how far the process's resident set rises above where it was before.

An allocator's count would miss what kernels allocate by themselves; the resident set holds everything that was
touched.  Linux keeps its highest value and lets a process reset it, so nothing has to be sampled or forked.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
from collections.abc import Callable
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
HOW = "peak memory: rise of the resident set during a call (VmHWM), freed memory returned before"


def peak_bytes(call: Callable[[], object], repeats: int = 3) -> int | None:
    """Median over ``repeats``; None where the system does not tell."""
    found = []
    for _ in range(repeats):
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
            before = _kilobytes("VmRSS")
            CLEAR.write_text("5")  # the highest value is the present one
        except (OSError, AttributeError):
            return None
        call()
        found.append(max(0, _kilobytes("VmHWM") - before) * 1024)
    return int(statistics.median(found))


def _kilobytes(field: str) -> int:
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1])
