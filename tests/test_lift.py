"""What the graph's operators become in named axes: casts, constants, layouts, slices and what they must not hide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.site import Miss, Site
from tests.joint import analysed, tensors, the_site

Program = Callable[..., Any]


def numbers(term: Term) -> set[Any]:
    return {t.attr for t in subterms(term) if t.op == "number"}


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_a_fill_that_half_cannot_hold_is_infinite(fill: float) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        s = (q @ k.mT).float().masked_fill(m, fill)
        return s.to(torch.float16).softmax(-1) @ v

    site = the_site(program, *tensors(dtype=torch.float16), torch.randn(8, 8) > 0)
    assert float("-inf") in numbers(site.score)


def test_a_fill_that_half_holds_stays_finite() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(m, -6e4).softmax(-1) @ v

    site = the_site(program, *tensors(dtype=torch.float16), torch.randn(8, 8) > 0)
    assert float("-inf") not in numbers(site.score)


def test_a_float_mask_cast_to_half_is_captured_after_the_cast() -> None:
    """A float32 minimum becomes -inf there: the mask is the tensor of half, not the one it was made of."""
    site = the_site(
        lambda q, k, v, m: (q @ k.mT + m.half()).softmax(-1) @ v, *tensors(dtype=torch.float16), torch.randn(8, 8)
    )
    assert site.captures[0].operand.node.meta["val"].dtype == torch.float16


def test_scores_with_a_mask_that_are_cast_down_are_left_alone() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return ((q @ k.mT).float() + m).half().softmax(-1) @ v

    (miss,) = analysed(program, *tensors(dtype=torch.float16), torch.randn(8, 8))
    assert isinstance(miss, Miss)
    assert "convert_element_type" in str(miss)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "program",
    [
        lambda q, k, v: (q @ k.mT)[:, :, :, :].clone().contiguous().view(6, 8, 8).softmax(-1).view(2, 3, 8, 8) @ v,
        lambda q, k, v: (q.permute(2, 0, 1, 3).permute(1, 2, 0, 3) @ k.mT).softmax(-1) @ v,
        lambda q, k, v: torch.einsum("bhid,bhjd->ijbh", q, k).softmax(1).permute(2, 3, 0, 1) @ v,
        lambda q, k, v: (q.view(2, 3, 2, 4, 4) @ k.mT[:, :, None]).softmax(-1) @ v[:, :, None],
        lambda q, k, v: (q.transpose(1, 2).reshape(2, 8, 12).view(2, 8, 3, 4).transpose(1, 2) @ k.mT).softmax(-1) @ v,
    ],
    ids=["clones and views", "permutes", "rows and columns first", "blocks of queries", "split heads"],
)
def test_layout_disappears(program: Program, grad: bool) -> None:
    site = the_site(program, *tensors(grad=grad))
    assert str(site.score) == "<score>"
    assert site.training is grad


@pytest.mark.parametrize(
    "mask",
    [
        lambda: torch.ones(8, 8, dtype=torch.bool).tril(),
        lambda: torch.arange(8)[None] <= torch.arange(8)[:, None],
        lambda: ~torch.ones(8, 8).triu(1).bool(),
        lambda: torch.tril(torch.ones(8, 8)) != 0,
    ],
    ids=["tril", "arange", "triu", "float tril"],
)
def test_masks_built_in_the_graph_are_relations_of_indices(mask: Callable[[], Tensor]) -> None:
    site = the_site(lambda q, k, v: (q @ k.mT).masked_fill(~mask(), float("-inf")).softmax(-1) @ v, *tensors())
    assert site.captures == ()
    assert any(t.op == "index" for t in subterms(site.score))


def test_a_mask_cut_out_of_a_buffer_is_a_capture() -> None:
    buffer = torch.ones(1, 1, 16, 16).tril()
    site = the_site(
        lambda q, k, v, b: (q @ k.mT).masked_fill(b[:, :, :8, :8] == 0, float("-inf")).softmax(-1) @ v,
        *tensors(),
        buffer,
    )
    assert len(site.captures) == 1


def test_a_tensor_read_along_two_axes_is_two_terms() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, segment: Tensor) -> Tensor:
        other = segment[:, None, :, None] != segment[:, None, None, :]
        return (q @ k.mT).masked_fill(other, float("-inf")).softmax(-1) @ v

    site = the_site(program, *tensors(), torch.randint(3, (2, 8)))
    assert isinstance(site, Site)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_masks_of_other_types(dtype: torch.dtype) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return (q @ k.mT + (1.0 - m[:, None, None, :].to(q.dtype)) * -10000.0).softmax(-1) @ v

    site = the_site(program, *tensors(grad=True), torch.ones(2, 8, dtype=dtype))
    assert {g.role for g in site.gradients} == {"query", "key", "value"}
