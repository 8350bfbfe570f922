"""A pattern of an author's own takes every spelling of its form, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpa_rewrite import patterns
from tests.authoring import forms
from tests.harness import reasons, same_as_eager, statuses


def ran(function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    with patterns.scope(forms.gated):
        told = same_as_eager(function, *args, **options)
    assert statuses(told) == ["fused"], reasons(told)
    return [o.emitter for o in told.sites]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("spelling", forms.SPELLINGS, ids=lambda f: f.__name__)
def test_every_spelling(spelling: Callable[..., Tensor], grad: bool) -> None:
    assert ran(spelling, *forms.tensors(grad=grad)) == ["pattern gated"]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("spelling", [forms.plain, forms.heads_last], ids=lambda f: f.__name__)
def test_symbolic_sizes(spelling: Callable[..., Tensor], grad: bool) -> None:
    assert ran(spelling, *forms.tensors(grad=grad), dynamic=True) == ["pattern gated"]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_number_that_may_change(grad: bool) -> None:
    number = 0.3  # under dynamic shapes a float64 tensor in the graph, cast down at each use

    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return ((q @ k.mT) * number).softmax(-1) @ v * g.sigmoid()

    assert ran(function, *forms.tensors(grad=grad), dynamic=True) == ["pattern gated"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 2])
def test_half_types_and_a_batch_of_one(batch: int, dtype: torch.dtype) -> None:
    assert ran(forms.plain, *forms.tensors(batch, grad=True, dtype=dtype)) == ["pattern gated"]


def test_only_the_value_needs_a_gradient() -> None:
    q, k, v, g = forms.tensors()
    assert ran(forms.plain, q, k, v.requires_grad_(), g) == ["pattern gated"]


def test_attention_in_a_replacement_is_fused_in_turn() -> None:
    """Another head size for the values: torch spells its own attention out, and the engine takes that."""
    q, k, v, g = forms.tensors(grad=True)
    with patterns.scope(forms.gated):
        told = same_as_eager(forms.plain, q, k, v.repeat(1, 1, 1, 2), g.repeat(1, 1, 1, 2))
    assert [o.emitter for o in told.sites] == ["pattern gated", "fused"]
