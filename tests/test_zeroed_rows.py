"""Probabilities set to 0 where scores were set to -inf: a row that sees nothing is 0, not NaN, in every direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpa_rewrite import report
from tests.harness import same_as_eager
from tests.test_emit_flex import INFINITY, fused_by
from tests.test_emit_fused import OURS, learned

Function = Callable[..., Tensor]


def filled_twice(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.3).masked_fill(hidden, -INFINITY)
    return scores.softmax(-1).masked_fill(hidden, 0.0) @ v


def compared_with_a_constant(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """As CPM-Ant writes it: the condition twice, each beside a constant tensor of its own."""
    scores = torch.masked_fill(q @ k.mT * 0.3, seen == torch.tensor(False), torch.scalar_tensor(-INFINITY))
    weights = torch.masked_fill(scores.softmax(-1), seen == torch.tensor(False), torch.scalar_tensor(0))
    return weights @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.where(seen, q @ k.mT * 0.3, -INFINITY)
    return torch.where(seen, scores.softmax(-1) * 1.25, 0.0) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """The first rows see nothing."""
    hidden = torch.arange(k.shape[-2]) > torch.arange(q.shape[-2])[:, None] - 3
    return filled_twice(q, k, v, hidden)


def biased(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """A row may be -inf by its bias too: then it is NaN where something of it is not set to 0."""
    bias = torch.zeros(q.shape[-2], 1).index_fill(0, torch.tensor([1, 4]), -INFINITY)
    scores = (q @ k.mT * 0.3 + bias).masked_fill(hidden, -INFINITY)
    return scores.softmax(-1).masked_fill(hidden, 0.0) @ v


def with_integers(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """The mask is the ``|`` of an integer tensor with one of truth values."""
    numbers = torch.full(hidden.shape, 0, dtype=torch.int64) | hidden
    return filled_twice(q, k, v, numbers == 1)


NEGATED = {compared_with_a_constant, chosen}


def operands(function: Function, dtype: torch.dtype = torch.float32, n: int = 17) -> list[Tensor]:
    """Query, key, value, and a mask of which a row (the second) and one head's last row hide everything."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8).to(dtype) for _ in range(3))
    hidden = torch.rand(2, 4, n, n) > 0.6
    hidden[:, :, 1] = True
    hidden[1, 2, -1] = True
    hidden[..., 4, 0] = False
    return [q, k, v, ~hidden if function in NEGATED else hidden]


FORMS = [filled_twice, compared_with_a_constant, chosen, causal, biased, with_integers]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("function", FORMS, ids=lambda f: f.__name__)
def test_rows_that_see_nothing(function: Function, training: bool) -> None:
    args = operands(function)
    with torch.set_grad_enabled(training):
        found = same_as_eager(function, *(learned(*args) if training else args), emitters=OURS)
    if training and function is biased:
        (site,) = found.sites
        assert "a row of -inf by capture" in str(site.reasons[0])
    else:
        assert fused_by(found) == ["fused"]


def test_beside_a_sink_no_row_is_nan() -> None:
    """A learned bias may make a row -inf there in training too: the sink takes it all."""

    def function(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.3 + bias).masked_fill(hidden, -INFINITY)
        column = sinks.expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        return weights.masked_fill(hidden, 0.0) @ v

    args = [*operands(function), torch.randn(4, 17, 17), torch.randn(4, 1, 1)]
    assert fused_by(same_as_eager(function, *learned(*args), emitters=OURS)) == ["fused"]


def test_zeros_elsewhere_are_declined() -> None:
    """Where a row of -inf is not set to 0 as a whole it is NaN: that is not the kernel's to know."""

    def function(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.3).masked_fill(hidden, -INFINITY)
        return scores.softmax(-1).masked_fill(hidden.mT, 0.0) @ v

    found = same_as_eager(function, *operands(function), emitters=OURS)
    (site,) = found.sites
    assert site.status == "recognised"
    assert "differs on a small instance" in str(site.reasons[-1])


@pytest.mark.codegen
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled(dtype: torch.dtype) -> None:
    q, k, v, hidden = operands(filled_twice, dtype, n=130)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with report.collect() as collected:
        options: dict[str, Any] = {"sdpa_rewrite.cost_model": False}
        out = torch.compile(filled_twice, backend="sdpa_rewrite", options=options)(q, k, v, hidden)
    assert fused_by(collected) == ["fused"]
    grads = torch.autograd.grad(out.float().square().sum(), inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    true = filled_twice(wide[0], wide[1], wide[2], hidden)
    true_grads = torch.autograd.grad(true.square().sum(), wide)
    assert (out[:, :, 1] == 0).all()
    allowed = 1e-5 if dtype == torch.float32 else 3e-2
    for mine, theirs in zip((out, *grads), (true, *true_grads), strict=True):
        assert not mine.isnan().any()
        torch.testing.assert_close(mine.double(), theirs, atol=allowed * theirs.abs().max().item(), rtol=0)
