"""The multiply-add peak of the cores in use: chains of independent multiply-adds on registers, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from sdpa_rewrite.processor import pairs

ROUNDS = 200_000


@functools.cache
def _kernel() -> Callable[..., None]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    types = ["const float*", "float*", "double*", "const int64_t", "const int64_t"]
    source = Path(__file__).with_name("peak.cpp").read_text()
    kernel: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(types, source)
    return kernel


def burst(dtype: torch.dtype) -> tuple[Callable[[], None], float]:
    """A call that does nothing but multiply and add on all threads, and how many operations it does.

    For bfloat16 by dot products of pairs where the kernels use them (or tiles); every other type as float32.
    """
    numbers, out = torch.full((12,), 1e-3), torch.empty(torch.get_num_threads())
    operations = torch.zeros(1, dtype=torch.float64)
    kernel, halves = _kernel(), int(dtype == torch.bfloat16 and pairs() != "floats")

    def call() -> None:
        kernel(numbers, out, operations, ROUNDS, halves)

    call()
    return call, float(operations)
