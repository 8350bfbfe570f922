"""The kernels as Inductor compiles them, on sizes, layouts and thread counts that are drawn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sdpa_rewrite import report
from tests.test_cpu_kernels import biased, capped_causal, results, with_dropout

pytestmark = pytest.mark.codegen
Function = Callable[..., Tensor]
GROUP = 3
LENGTHS = (2, 5, 17, 64, 65, 129, 300)
COTANGENTS = 4
HEAD_SIZES = (8, 16, 40, 80, 96, 256)
LAYOUTS = ((False, False, False), (True, True, True), (True, False, True))
"""Which of query, key and value have their heads after their positions in memory: each compiles a kernel."""
ROUNDINGS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Of the largest value: what may be added to half as much again as the error of the program as written."""
CANCELLED = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""A gradient that is only a difference of equal terms is as large as their rounding: these are up to about ten."""


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(GROUP, 1) for x in (k, v))
    return capped_causal(q, k, v)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by ATen's kernel, which as ours takes the sum of a row of slopes from the rounded output."""
    return scaled_dot_product_attention(q, k, v)


@st.composite
def tensors(draw: st.DrawFn, function: Function) -> list[Tensor]:
    """Query, key, value and what else ``function`` takes, in layouts that are not always the plain one."""
    batch, shared = (
        draw(st.sampled_from((2, 4))),
        draw(st.sampled_from((3, 5))),
    )  # never equal, which would be one symbol
    heads = shared * (GROUP if function is grouped else 1)
    rows, columns = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from((*LENGTHS, 1000)))
    depth, width = draw(st.sampled_from(HEAD_SIZES)), draw(st.sampled_from(HEAD_SIZES))
    layout = draw(st.sampled_from(LAYOUTS))
    if function is grouped:
        rows = min(rows, columns)  # every row sees a key
    out = [
        _laid(torch.randn(batch, h, n, d), transposed)
        for h, n, d, transposed in zip(
            (heads, shared, shared), (rows, columns, columns), (depth, depth, width), layout, strict=True
        )
    ]
    if function is biased:
        hidden = torch.rand(batch, 1, rows, columns) > draw(st.sampled_from((0.3, 0.9)))
        out += [torch.randn(heads, rows, columns), torch.randn(heads, 1, 1) / 5, hidden]
    return out


def _laid(x: Tensor, transposed: bool) -> Tensor:
    """The heads before or after the positions in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x


@functools.cache
def fused(function: Function) -> Function:
    options = {"emitters": ("fused",), "strict": True, "cost_model": False}
    return torch.compile(function, backend="sdpa_rewrite", dynamic=True, options=options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (plain, torch.bfloat16),
        (plain, torch.float16),
        (grouped, torch.float32),
        (grouped, torch.bfloat16),
        (biased, torch.float32),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_no_less_exact_than_unfused(function: Function, dtype: torch.dtype) -> None:
    @seed(0)
    @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)
    @given(st.data(), st.sampled_from((1, 2)))
    def sweep(data: st.DataObject, threads: int) -> None:
        drawn = [x.to(dtype) if x.is_floating_point() else x for x in data.draw(tensors(function))]
        torch.set_num_threads(threads)
        _check(function, drawn)

    before = torch.get_num_threads()
    limits: Any = torch._dynamo.config.patch(recompile_limit=30, fail_on_recompile_limit_hit=True)
    try:
        with limits, report.collect() as collected:
            sweep()
    finally:
        torch.set_num_threads(before)
    assert {o.emitter for o in collected.sites} == {"fused"}


def _check(function: Function, drawn: list[Tensor]) -> None:
    """One number for all of a head is a sum whose error is chance: each error is a mean over some cotangents."""

    def errors(f: Function) -> list[float]:
        runs = (zip(results(f, drawn, c), true, strict=True) for c, true in enumerate(exact))
        squares = zip(*([(x.double() - y).square() for x, y in run] for run in runs), strict=True)
        return [float(torch.stack(s).mean(0).max()) ** 0.5 for s in squares]

    double = [x.double() if x.is_floating_point() else x for x in drawn]
    exact = [results(function, double, c) for c in range(COTANGENTS)]
    yardsticks = [errors(f) for f in (function, *((sdpa,) if function is plain else ()))]
    for k, (error, *others) in enumerate(zip(errors(fused(function)), *yardsticks, strict=True)):
        largest, dtype = max(float(true[k].abs().max()) for true in exact), drawn[0].dtype
        told = f"value {k} of {[tuple(x.shape) for x in drawn]}, up to {largest:.3g}"
        noise = ROUNDINGS[dtype] * largest + CANCELLED[dtype]
        assert error <= 1.5 * max(others) + noise, f"{told}: {error:.3g}, as written and by ATen's kernel {others}"


@pytest.mark.parametrize("n", [1, 2, 5])
def test_what_cancels_is_zero(n: int) -> None:
    """Where a row sees one key, its probability is 1 and all slopes of its scores are 0, but for their rounding."""
    q, k, v, bias = (torch.randn(s) for s in ((2, 3, n, 40), (2, 3, 17, 40), (2, 3, 17, 40), (3, n, 17)))
    hidden = torch.ones(2, 1, n, 17, dtype=torch.bool).scatter(-1, torch.randint(17, (2, 1, n, 1)), False)
    temperature = torch.randn(3, 1, 1) / 5
    _, grad_query, grad_key, _, *learned = results(fused(biased), [q, k, v, bias, temperature, hidden])
    assert max(float(x.abs().max()) for x in (grad_query, grad_key, *learned)) < 1e-6


def test_dropout_of_a_compiled_function_has_its_own_gradient() -> None:
    """The difference quotient along a direction, with the mask of one seed."""
    q, k, v = (torch.randn(2, 2, 70, 24) for _ in range(3))
    step = [torch.randn_like(x) * 1e-3 for x in (q, k, v)]
    function = fused(with_dropout)
    _, *gradients = results(function, [q, k, v])
    cotangent = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    up, down = (results(function, [x + s * d for x, d in zip((q, k, v), step, strict=True)])[0] for s in (1, -1))
    quotient = ((up.double() - down.double()) * cotangent).sum() / 2
    slope = sum((g.double() * d).sum() for g, d in zip(gradients, step, strict=True))
    torch.testing.assert_close(quotient, slope, rtol=2e-2, atol=1e-6)
