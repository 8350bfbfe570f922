"""Probabilities that are multiplied and then divided by their sum, and rows of NaN that are set to 0."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sdpa_rewrite import report
from tests.harness import same_as_eager, statuses
from tests.test_cpu_kernels import check, ours
from tests.test_emit_fused import OURS, learned

Function = Callable[..., Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.3


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """As AllenNLP's masked_softmax: the scores are masked by a product, and the weights again."""
    p = (scores(q, k) * seen).softmax(-1) * seen
    return p / (p.sum(-1, keepdim=True) + 1e-13) @ v


def shared(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Without a guard, a row that sees nothing is NaN."""
    p = scores(q, k).softmax(-1) * seen
    return p / p.sum(-1, keepdim=True) @ v


def clamped(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    p = torch.where(seen, scores(q, k).softmax(-1), 0.0)
    return (p / p.sum(-1, keepdim=True).clamp(min=1e-6)) @ v


def by_position(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """A prior of the distance, causal."""
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    p = scores(q, k).softmax(-1) * torch.where(j > i, 0.0, torch.exp((j - i) * 0.1)).to(q.dtype)
    return p / p.sum(-1, keepdim=True) @ v


def beside_a_sink(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    joined = torch.cat([scores(q, k), torch.zeros(*seen.shape[:3], 1, dtype=q.dtype)], -1)
    p = joined.softmax(-1)[..., :-1] * seen
    return p / (p.sum(-1, keepdim=True) + 1e-9) @ v


def numbers_for_nan(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~seen, -math.inf).softmax(-1).nan_to_num() @ v


def unequal_to_itself(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    p = scores(q, k).masked_fill(~seen, -math.inf).softmax(-1) * 1.25
    return torch.where(p == p, p, 0.0) @ v


def both(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    p = torch.nan_to_num(scores(q, k).masked_fill(~seen, -math.inf).softmax(-1)) * seen
    return p / (p.sum(-1, keepdim=True) + 1e-9) @ v


FORMS = [masked, shared, clamped, by_position, beside_a_sink, numbers_for_nan, unequal_to_itself, both]


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value, and a mask of which the second row and one head's last row see nothing."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, d).to(dtype) for n, d in ((17, 8), (33, 8), (33, 12)))
    seen = torch.rand(2, 4, 17, 33) > 0.6
    seen[:, :, 1] = False
    seen[1, 2, -1] = False
    return [q, k, v, seen]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("function", FORMS, ids=lambda f: f.__name__)
def test_fused(function: Function, training: bool) -> None:
    args = operands()
    if function is shared and training:  # NaN of a row is NaN of all keys' gradients
        args[3] |= torch.arange(33) == 5
    with torch.set_grad_enabled(training):
        found = same_as_eager(function, *(learned(*args) if training else args), emitters=OURS)
    assert statuses(found) == ["fused"]


@pytest.mark.parametrize("function", FORMS, ids=lambda f: f.__name__)
def test_half_keeps_the_sum_in_float32(function: Function) -> None:
    """What the rows' sums are too small for half, were they rounded to it, is as exact as unfused."""
    q, k, v, seen = operands(torch.float16)
    k[..., 4:, :] += 30 * q.mean((-2), keepdim=True).sign()  # the first four keys have next to nothing
    seen[..., 4:] &= torch.arange(17)[:, None] > 8
    assert statuses(same_as_eager(function, q, k, v, seen, emitters=OURS)) == ["fused"]


def test_a_row_of_nan_for_another_reason_is_zero_too() -> None:
    q, k, v, seen = operands()
    q[0, 0, 3] = math.nan
    q[1, 1, 4] = math.inf
    assert statuses(same_as_eager(numbers_for_nan, q, k, v, seen, emitters=OURS)) == ["fused"]


@pytest.mark.codegen
@pytest.mark.parametrize("function", [masked, numbers_for_nan], ids=lambda f: f.__name__)
def test_as_inductor_compiles_it(function: Function) -> None:
    compiled = ours(function, dynamic=True)
    with report.collect() as collected:
        for n in (17, 150):
            q, k, v = torch.randn(2, 4, n, 8), torch.randn(2, 4, 33, 8), torch.randn(2, 4, 33, 12)
            seen = torch.rand(2, 1, n, 33) > 0.6
            seen[:, :, 1] = False
            check(compiled, function, [q, k, v, seen])
    assert {o.emitter for o in collected.sites} == {"fused"}


def added(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """-inf is added: NaN reaches the query, whose gradient says so."""
    mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    return torch.nan_to_num((scores(q, k) + mask).softmax(-1)) @ v


def weighted_between(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The sum is of other weights than those that meet the values."""
    p = scores(q, k).softmax(-1) * seen
    return p * (seen.sum(-2, keepdim=True) % 3) / (p.sum(-1, keepdim=True) + 1e-9) @ v


def squared(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    return p / p.square().sum(-1, keepdim=True) @ v


def infinite(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """0 times infinity is NaN where no probability is."""
    p = scores(q, k).masked_fill(~seen, -math.inf).softmax(-1) * torch.where(seen, 1.0, math.inf)
    return torch.where(p.isnan(), 0.0, p) @ v


def only_nan(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    p = scores(q, k).masked_fill(~seen, -math.inf).softmax(-1)
    return torch.where(~(p == p), p, 0.0) @ v


def another_number(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.5) @ v


@pytest.mark.parametrize(
    ("function", "training", "reason"),
    [
        (added, True, "has NaN in part of a gradient"),
        (weighted_between, False, "not only multiplied"),
        (squared, False, "not only multiplied"),
        (infinite, False, "not only multiplied"),
        (only_nan, False, "not only multiplied"),
        (another_number, False, "not only multiplied"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_left_as_written(function: Function, training: bool, reason: str) -> None:
    args = operands()
    with torch.set_grad_enabled(training):
        found = same_as_eager(function, *(learned(*args) if training else args), emitters=OURS)
    (site,) = found.sites
    assert site.status == "recognised"
    assert any(reason in r.text for r in site.reasons)
