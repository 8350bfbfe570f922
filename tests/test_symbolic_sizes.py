"""Sizes that are expressions: estimates from the first inputs, equalities that algebra does not see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import sdpa_rewrite
from sdpa_rewrite.algebra.hints import LONG, estimated, hints_of
from sdpa_rewrite.emit.arrange import same_shapes, same_strides


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    """A fake mode whose guards are checked, as while Dynamo compiles."""
    found = FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(found)):
        yield found


def size(mode: FakeTensorMode, hint: int, name: str = "n") -> Any:
    assert mode.shape_env is not None
    source = ConstantSource(name)
    symbol = mode.shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    return mode.shape_env.create_symintnode(symbol, hint=hint, source=source)


def empty(mode: FakeTensorMode, *shape: Any) -> Tensor:
    with mode:
        return torch.empty(shape)


def guards(mode: FakeTensorMode) -> int:
    assert mode.shape_env is not None
    return len(mode.shape_env.guards)


def test_sizes_equal_at_all_values_are_equal_under_a_guard(mode: FakeTensorMode) -> None:
    n = size(mode, 40)
    side = n // 4
    x, y = empty(mode, side * side // side, 16), empty(mode, side, 16)
    before = guards(mode)
    assert same_shapes(x, y)
    assert guards(mode) == before + 1
    assert same_shapes(x, y)
    assert guards(mode) == before + 1  # what is a guard already is known


def test_sizes_equal_by_chance_are_not_equal(mode: FakeTensorMode) -> None:
    n, m = size(mode, 40), size(mode, 20, "m")
    pairs = [(n, m + 20), (n // 2, m), (n // 3, n - 27)]
    tensors = [(empty(mode, 2, a), empty(mode, 2, b)) for a, b in pairs]
    before = guards(mode)
    assert not any(same_shapes(x, y) or same_strides(x, y) for x, y in tensors)
    assert guards(mode) == before


def test_what_guards_exclude_does_not_count(mode: FakeTensorMode) -> None:
    n = size(mode, 40)
    assert n // 32 == 1
    assert same_strides(empty(mode, 2, 16 * (n // 32), 5), empty(mode, 2, 16, 5))


def test_no_guard_where_none_is_checked() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    side = size(mode, 40) // 4
    before = guards(mode)
    assert not same_shapes(empty(mode, side * side // side), empty(mode, side))
    assert guards(mode) == before


def test_hints_are_the_first_inputs(mode: FakeTensorMode) -> None:
    n, m = size(mode, 40), size(mode, 99, "m")
    x = empty(mode, n // 3, 7)
    assert estimated((n // 3).node.expr, hints_of([x])) == 13
    assert estimated((n + 2).node.expr, hints_of([x])) == 42
    assert estimated(m.node.expr, hints_of([x])) == LONG
    assert estimated(5, {}) == 5


def test_a_guess_that_divides_by_zero(mode: FakeTensorMode) -> None:
    n = size(mode, 99)
    assert estimated((12 // (n % 4)).node.expr, {}) == LONG  # 1024 is a multiple of 4
    assert isinstance((12 // (n % 4)).node.expr, sympy.Basic)


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = 12 // (k.shape[-2] % 4)
    return (q[:n] @ k[:n].mT * 0.3).softmax(-1) @ v[:n]


def test_report_of_a_batch_that_is_an_expression() -> None:
    q, k, v = torch.randn(7, 10, 8), torch.randn(7, 99, 8), torch.randn(7, 99, 8)
    with torch._dynamo.config.patch(assume_static_by_default=False), sdpa_rewrite.config.patch(cost_model=False):
        report = sdpa_rewrite.explain(sliced, q, k, v)
    (site,) = report.sites
    assert site.status == "fused"
    assert site.bytes_avoided == 4 * 10 * 99 * 4
