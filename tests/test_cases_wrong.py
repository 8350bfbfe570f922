"""Forms that others get silently wrong (table W of the cases people reported)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite import report
from tests.harness import compiled, same_as_eager, statuses
from tests.test_cases_missed import qkv


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("square", [False, True], ids=["", "as many keys as the head size"])
def test_W1_keys_permuted_straight(grad: bool, square: bool) -> None:
    """K goes from (B, T, H, D) to (B, H, D, T) in one permute; with T = D nothing but the roles tells them apart."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
        return ((q @ k) / math.sqrt(8)).softmax(-1) @ v

    told = same_as_eager(attention, *qkv(h=8 if square else 6, d=8, grad=grad))
    assert statuses(told) == ["fused"]


@pytest.mark.parametrize("inverse", [3.0, 0.1, 1.0])
def test_W2_a_divisor_that_is_not_the_default_scale(inverse: float) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)).div(inverse) + m).softmax(-1) @ v

    told = same_as_eager(attention, *qkv(grad=True), torch.randn(2, 1, 6, 6))
    assert statuses(told) == ["fused"]


EMPTY_ROW = torch.rand(6, 6, generator=torch.Generator().manual_seed(3)) > 0.4
EMPTY_ROW[2] = False


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fill", [-math.inf, -1e4, -1e9, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("way", ["fill", "add", "multiply"])
def test_W3_a_row_masked_as_a_whole(fill: float, way: str, grad: bool) -> None:
    """-inf gives NaN, a filled finite value gives the mean of the values, an added one whatever adding it gives."""
    if way == "multiply" and math.isinf(fill):
        pytest.skip("0 * inf is NaN everywhere")

    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.3
        if way == "fill":
            scores = scores.masked_fill(~keep, fill)
        elif way == "add":
            scores = scores + torch.zeros_like(scores).masked_fill(~keep, fill)
        else:
            scores = scores + (1.0 - keep.to(scores.dtype)) * fill
        return scores.softmax(-1) @ v

    told = same_as_eager(attention, *qkv(grad=grad), EMPTY_ROW)
    assert statuses(told) == ["fused"]
    q, k, v = qkv()
    row = compiled(attention)(q, k, v, EMPTY_ROW)[:, :, 2]
    if math.isinf(fill):
        assert row.isnan().all()
    elif way == "fill":
        torch.testing.assert_close(row, v.mean(2))


@pytest.mark.parametrize("grad", [False, True])
def test_W3_safe_softmax_gives_zero(grad: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        scores = ((q @ k.transpose(-2, -1)) * 0.3).masked_fill(~keep, -math.inf)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        return torch.where(empty, 0.0, scores.softmax(-1)) @ v

    told = same_as_eager(attention, *qkv(), EMPTY_ROW)
    assert statuses(told) == ["fused"]
    q, k, v = qkv()
    assert (compiled(attention)(q, k, v, EMPTY_ROW)[:, :, 2] == 0).all()


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("grad", [False, True])
def test_W3_a_finite_fill_beside_a_padding_mask(fill: float, grad: bool) -> None:
    """Left padding and a causal fill: the padded rows hold filled and padded positions of about the same size."""

    def attention(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.3
        causal = torch.tril(torch.ones(6, 6, dtype=torch.bool))
        scores = torch.where(causal, scores, fill)
        return (scores + (1.0 - real[:, None, None, :]) * fill).softmax(-1) @ v

    real = torch.ones(2, 6)
    real[1, :3] = 0
    same_as_eager(attention, *qkv(grad=grad), real)


def test_W3_two_fills_that_only_together_cover_a_row() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.3
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)
        return scores.masked_fill(keep == 0, -1e4).softmax(-1) @ v

    keep = torch.ones(2, 1, 1, 6)
    keep[1, ..., :3] = 0
    told = same_as_eager(attention, *qkv(), keep)
    assert statuses(told) == ["fused"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["q", "k", "both", "scores"])
def test_W4_where_the_scale_sits_costs_no_precision(dtype: torch.dtype, place: str) -> None:
    """Fourteen blocks in a row, against float64: no worse than the program as written."""
    c = 8**-0.5
    factors = {"q": (c, 1.0, 1.0), "k": (1.0, c, 1.0), "both": (c**0.5, c**0.5, 1.0), "scores": (1.0, 1.0, c)}[place]

    def block(x: Tensor, w: Tensor) -> Tensor:
        b, s, n = x.shape
        q, k, v = (y.view(b, s, n // 8, 8).transpose(1, 2) for y in (F.layer_norm(x, (n,)) @ w).chunk(3, -1))
        p = ((q * factors[0]) @ (k * factors[1]).transpose(-2, -1) * factors[2]).softmax(-1)
        return x + (p @ v).transpose(1, 2).reshape(b, s, n)

    def blocks(x: Tensor, weights: list[Tensor]) -> Tensor:
        for w in weights:
            x = block(x, w)
        return x

    x, weights = torch.randn(2, 12, 32), [torch.randn(32, 96) * 0.2 for _ in range(14)]
    low, low_weights = x.to(dtype), [w.to(dtype) for w in weights]
    exact = blocks(low.double(), [w.double() for w in low_weights])
    with report.collect() as told:
        ours = compiled(blocks)(low, low_weights)
    assert statuses(told) == ["fused"] * 14
    written = blocks(low, low_weights)
    error = (ours.double() - exact).abs().mean()
    assert error <= 1.6 * (written.double() - exact).abs().mean() + 1e-6


@pytest.mark.parametrize("grad", [False, True])
def test_W5_a_scale_that_multiplies_the_mask_too(grad: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return (((q @ k.transpose(-2, -1)) + m) * 0.2).softmax(-1) @ v

    told = same_as_eager(attention, *qkv(grad=grad), torch.randn(2, 1, 6, 6))
    assert statuses(told) == ["fused"]
    assert told.sites[0].form is not None
    assert told.sites[0].form.scale == "0.2"


@pytest.mark.parametrize("scale", [lambda s: s, lambda s: s * 1.0, lambda s: s / 1.0, lambda s: 1 * s])
def test_W6_a_scale_of_one(scale: Callable[[Tensor], Tensor]) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scale(q @ k.transpose(-2, -1)).softmax(-1) @ v

    told = same_as_eager(attention, *qkv(grad=True))
    assert statuses(told) == ["fused"]
    assert told.sites[0].form is not None
    assert told.sites[0].form.scale == "1"


def test_W7_half_probabilities_and_float_values_raise_as_in_eager() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v.float()

    q, k, v = qkv(dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        attention(q, k, v)
    with pytest.raises(Exception, match=r"dtype|scalar type"):
        compiled(attention)(q, k, v)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_W8_gradients_of_grouped_queries_with_safe_softmax_are_finite(kv_heads: int) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
        scores = ((q @ k.transpose(-2, -1)) * 0.3).masked_fill(~keep, -math.inf)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        return torch.where(empty, 0.0, scores.softmax(-1)) @ v

    keep = EMPTY_ROW.clone()
    keep[2, 0] = True
    q, _, _ = qkv(grad=True)
    k, v = (torch.randn(2, kv_heads, 6, 8, requires_grad=True) for _ in range(2))
    same_as_eager(attention, q, k, v, keep)
    out = compiled(attention)(q, k, v, keep)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("grad", [False, True])
def test_W9_a_mask_that_multiplies_the_scores(grad: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) * 0.3 * m).softmax(-1) @ v

    told = same_as_eager(attention, *qkv(grad=grad), (torch.rand(6, 6) > 0.5).float())
    assert statuses(told) == ["fused"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dim", [-2, 1, 0])
def test_W10_softmax_over_another_axis(dim: int, grad: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) * 0.2).softmax(dim) @ v

    told: Any = same_as_eager(attention, *qkv(b=4, h=4, s=4, d=4, grad=grad))
    assert "fused" not in statuses(told)


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("grad", [False, True])
def test_a_causal_mask_and_a_scale_that_is_not_positive(scale: float, grad: bool) -> None:
    """ATen's kernel on the CPU multiplies its own -inf by the scale."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * scale
        return scores.masked_fill(torch.ones(6, 6).triu(1) == 1, -math.inf).softmax(-1) @ v

    assert statuses(same_as_eager(attention, *qkv(grad=grad))) == ["fused"]
