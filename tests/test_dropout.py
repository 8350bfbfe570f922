"""``config.dropout``: whose mask a kernel may draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite import report
from sdpa_rewrite.emit import sdpa
from tests.harness import compiled, reasons, statuses

RATE = 0.25


def tensors() -> tuple[Tensor, ...]:
    q, k = (torch.randn(2, 4, 64, 16, dtype=torch.bfloat16) for _ in range(2))
    return tuple(x.requires_grad_() for x in (q, k, torch.ones_like(q)))


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT * 0.25).softmax(-1), RATE) @ v


def told(function: Any, *args: Tensor, **options: Any) -> report.Collected:
    with report.collect() as collected:
        compiled(function, **options)(*args)
    return collected


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs for CUDA, made and run on CPU."""
    monkeypatch.setattr(sdpa, "device_of", lambda site: torch.device("cuda"))


@pytest.mark.usefixtures("on_gpu")
def test_any_mask_lets_the_kernel_draw() -> None:
    """With values of one, an output is the mean of the mask over 1 - rate; its rows differ, their mean is 1."""
    q, k, v = tensors()
    f = compiled(dropped, emitters=("sdpa",), dropout="any")
    with report.collect() as collected:
        out = f(q, k, v)
    assert statuses(collected) == ["fused"], reasons(collected)
    rows = out.detach().float().mean(-1)
    assert rows.std() > 0.02
    assert abs(float(rows.mean()) - 1) < 0.05
    out.sum().backward()
    assert v.grad is not None
    # each column of the dropped probabilities, summed: the same mask as in the forward
    assert abs(float(v.grad.float().sum() - rows.sum() * 16)) < 0.02 * float(rows.sum() * 16)


@pytest.mark.usefixtures("on_gpu")
def test_the_exact_mask_is_not_left_to_the_kernel() -> None:
    collected = told(dropped, *tensors(), emitters=("sdpa",))
    assert statuses(collected) == ["recognised"]
    assert "draw a mask of their own (config.dropout is 'exact')" in reasons(collected)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("reader", ["mask", "numbers", "rate"])
def test_a_mask_that_is_more_than_this_dropout_is_kept(reader: str) -> None:
    """Two readers of one mask, or a factor that is not 1 / (1 - rate): no dropout that a kernel has."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = (q @ k.mT * 0.25).softmax(-1)
        drawn = torch.rand_like(p)
        kept = drawn > RATE
        out = p * kept * (1.5 if reader == "rate" else 1.0 / (1.0 - RATE)) @ v
        return out, {"mask": kept.sum(), "numbers": drawn.sum(), "rate": out.sum()}[reader]

    collected = told(function, *tensors(), emitters=("sdpa",), dropout="any")
    assert statuses(collected) == ["recognised"]
    assert "changed after the softmax" in reasons(collected)


@pytest.mark.parametrize("dropout", ["exact", "any"])
def test_atens_kernels_for_cpu_have_no_dropout(dropout: str) -> None:
    collected = told(dropped, *tensors(), emitters=("sdpa",), dropout=dropout)
    assert statuses(collected) == ["recognised"]
    assert "ATen's kernels for CPU have none" in reasons(collected)
