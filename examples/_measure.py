"""How the examples measure: side by side, alternating, medians; memory from the allocator's own count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def seconds(a: Callable[[], object], b: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of ``a`` and of ``b``, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for call in (a, b):
        call()
    for _ in range(repeats):
        for call, found in zip((a, b), times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that ``call`` held at once beyond what was there before, by the CPU allocator's record."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    held = peak = 0
    for event in record.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def report(name: str, stock: Callable[[], object], ours: Callable[[], object], repeats: int) -> None:
    """Print speed and memory of ``ours`` against ``stock``."""
    with torch.no_grad() if not torch.is_grad_enabled() else torch.enable_grad():
        before, after = seconds(stock, ours, repeats)
        print(f"{name}: {before / after:.2f}x as fast as stock torch.compile", end=", ")
        print(f"{peak_bytes(ours) / max(1, peak_bytes(stock)):.2f}x its peak memory")
