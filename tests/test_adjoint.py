"""Gradients found by their values: of biases, of expanded captures, through casts, copies and detours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdpa_rewrite.site import Miss, Site
from tests.joint import analysed, tensors, the_site


def roles(site: Site) -> set[str]:
    return {g.role for g in site.gradients}


@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8), (2, 1, 1, 8), (2, 3, 8, 8), (3, 1, 1), (1, 1, 8, 1)])
def test_a_bias_of_any_shape_has_its_gradient(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape, requires_grad=True)
    site = the_site(lambda q, k, v, b: (q @ k.mT + b).softmax(-1) @ v, *tensors(grad=True), bias)
    if shape == (3, 1, 1) or shape == (1, 1, 8, 1):  # constant along the keys: its gradient is zero, and still read
        assert "capture0" in roles(site)
    assert roles(site) == {"query", "key", "value", "capture0"}
    (found,) = (g for g in site.gradients if g.role == "capture0")
    assert found.result.axes == site.captures[0].operand.axes


def test_only_the_bias_needs_a_gradient() -> None:
    bias = torch.randn(3, 8, 8, requires_grad=True)
    site = the_site(lambda q, k, v, b: (q @ k.mT + b).softmax(-1) @ v, *tensors(), bias)
    assert roles(site) == {"capture0"}


def test_a_bias_shared_by_two_layers_is_summed_after_it_is_accumulated() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        wide = bias[None].expand(2, 3, 8, 8)
        x = (q @ k.mT + wide).softmax(-1) @ v
        return (x @ k.mT + wide).softmax(-1) @ v

    found = analysed(program, *tensors(grad=True), torch.randn(3, 8, 8, requires_grad=True))
    for site in found:
        assert isinstance(site, Site), site
        (gradient,) = (g for g in site.gradients if g.role == "capture0")
        assert gradient.result.axes == site.captures[0].operand.axes == site.scores_axes


def test_the_cotangent_is_what_meets_the_values() -> None:
    site = the_site(lambda q, k, v: ((q @ k.mT).softmax(-1) @ v).mul(3.0), *tensors(grad=True))
    assert site.cotangent is not None
    assert site.cotangent.axes == {*site.batch, *site.rows, *site.width}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_with_a_float_softmax(dtype: torch.dtype) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    assert roles(the_site(program, *tensors(grad=True, dtype=dtype))) == {"query", "key", "value"}


def test_scores_scaled_in_place() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        s /= 2.0
        return s.softmax(-1) @ v

    assert roles(the_site(program, *tensors(grad=True))) == {"query", "key", "value"}


def test_a_second_reader_of_the_scores_gradient_is_an_escape() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = q @ k.mT
        return s.softmax(-1) @ v, s.exp().sum()

    miss, *others = analysed(program, *tensors(grad=True))
    assert isinstance(miss, Miss)
    assert (miss.role, str(miss)) == ("escape", "the scores are also read by output, through sum_2")
    assert all(isinstance(other, Miss) for other in others)


def test_dynamic_shapes_read_the_shape_of_the_scores() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
        return s.masked_fill(~mask, float("-inf")).softmax(-1) @ v

    assert roles(the_site(program, *tensors(grad=True), dynamic=True)) == {"query", "key", "value"}
