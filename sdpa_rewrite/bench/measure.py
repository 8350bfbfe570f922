"""Time: all contenders in turn, again and again, so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

Call = Callable[[], object]
Times = dict[str, list[float]]

SAMPLE = 0.005
"""Seconds that a sample takes at least: what is shorter is called several times."""


def interleaved(calls: Mapping[str, Call], repeats: int, clock: Callable[[], float] = time.perf_counter) -> Times:
    """Seconds of each call in each of ``repeats`` rounds, after two calls that do not count."""
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, math.ceil(SAMPLE / max(_seconds(call, 1, clock), 1e-9)))
    times: Times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(_seconds(call, counts[name], clock))
    return times


def _seconds(call: Call, count: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(count):
        call()
    return (clock() - start) / count


def medians(times: Times) -> dict[str, float]:
    """The median seconds of each."""
    return {name: statistics.median(found) for name, found in times.items()}


def ratios(times: Times, to: str) -> dict[str, float]:
    """How many times as long as ``to`` the others take: the median of the ratios within a round."""
    return {
        name: statistics.median(a / b for a, b in zip(found, times[to], strict=True))
        for name, found in times.items()
        if name != to
    }
