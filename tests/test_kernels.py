"""The fused operator by itself: its static part, its generator, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from sdpa_rewrite.kernels import philox, program
from sdpa_rewrite.kernels.op import attention, attention_backward, differentiable_attention
from sdpa_rewrite.kernels.spec import Input, Part, Spec

SIZES = (2, 2, 3, 5, 7)


def add(score: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(score) + bias


def add_backward(score: Tensor, slope: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return slope * (1 - torch.tanh(score) ** 2), slope


def text_of(function: Callable[..., Any], inputs: int) -> str:
    return program.written(make_fx(function)(*(torch.zeros(()) for _ in range(inputs))))


BIASED = Spec(
    split=(1, 1, 1, 1, 1),
    inputs=(Input("tensor", (1, 2, 3, 4), 0),),
    score=Part(text_of(add, 2), (0,)),
    score_backward=Part(text_of(add_backward, 3), (0,), (0,)),
    learned=(0,),
    scale=0.5,
    dtype="float64",
)


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    q = torch.randn(2, 2, 3, 5, 4, dtype=dtype)
    k, v = torch.randn(2, 2, 7, 4, dtype=dtype), torch.randn(2, 2, 7, 6, dtype=dtype)
    return [q, k, v, torch.randn(1, 2, 3, 5, 7, dtype=dtype)]


def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    out, maximum, total = differentiable_attention(q, k, v, (bias,), SIZES, BIASED)
    return out, maximum.detach() + total.log()


def written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    logits = torch.tanh(q @ k.mT[:, :, None] * 0.5) + bias
    return logits.softmax(-1) @ v[:, :, None], logits.logsumexp(-1)


def test_a_spec_is_the_same_after_a_journey_as_text() -> None:
    assert Spec.of(BIASED.text()) == BIASED
    assert Spec.of(Spec((0, 0, 0, 1, 1), floor=-5e3, low=2).text()) == Spec((0, 0, 0, 1, 1), floor=-5e3, low=2)


def test_gradients_of_output_and_logsumexp() -> None:
    args = [x.requires_grad_() for x in operands()]
    weights = torch.randn(2, 2, 3, 5, 6, dtype=torch.float64), torch.randn(2, 2, 3, 5, dtype=torch.float64)

    def gradients(function: Any) -> tuple[Tensor, ...]:
        total = sum((x * w).sum() for x, w in zip(function(*args), weights, strict=True))
        return torch.autograd.grad(total, args)  # type: ignore[arg-type]

    torch.testing.assert_close(call(*args), written(*args))
    torch.testing.assert_close(gradients(call), gradients(written))


def test_fake_tensors_have_the_shapes_and_strides_of_real_ones() -> None:
    q, k, v, bias = operands(torch.float32)
    spec = Spec(**{**vars(BIASED), "order": (0, 3, 1, 2, 4), "dtype": "float32"}).text()
    real = attention(q, k, v, [bias], SIZES, spec)
    back = attention_backward(q, k, v, [bias], SIZES, spec, *real, torch.randn_like(real[0]), None)
    with FakeTensorMode() as mode:
        q, k, v, bias = map(mode.from_tensor, (q, k, v, bias))
        fake = attention(q, k, v, [bias], SIZES, spec)
        fake_back = attention_backward(q, k, v, [bias], SIZES, spec, *fake, torch.empty_like(fake[0]), None)
    for a, b in zip((*real, *back), (*fake, *fake_back), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_the_generator_is_philox() -> None:
    # the first words of the known-answer tests of the Random123 library: counter and key zero
    word = 0x6627E8D5
    seed, index = torch.tensor(0), torch.tensor([0])
    assert philox.uniform(seed, index).item() == pytest.approx((word & 0x7FFFFFFF) * 4.6566127342e-10)


def test_rows_without_a_visible_key() -> None:
    hide = text_of(lambda score: torch.where(score == score, float("-inf"), score), 1)
    q, k, v, _ = operands(torch.float32)
    for safe in (False, True):
        spec = Spec((1, 1, 1, 1, 1), score=Part(hide, ()), safe=safe)
        out, maximum, total = attention(q, k, v, [], SIZES, spec.text())
        assert bool((out == 0).all()) if safe else bool(out.isnan().all())
        assert bool((maximum == float("-inf")).all())
        assert bool((total == 0).all())


def test_a_program_is_the_same_after_a_journey_as_text() -> None:
    def function(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(n > 2, x.to(torch.bfloat16), float("-inf")), torch.full((), 1e-3) * x

    x, n = torch.randn(4), torch.tensor([1, 2, 3, 4])
    text = program.written(make_fx(function)(x, n))
    for a, b in zip(program.read(text)(x, n), function(x, n), strict=True):
        torch.testing.assert_close(a, b)
    assert program.written(program.read(text)) == text


def test_a_program_that_is_no_calls_of_operators_is_refused() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x.sin())
    with pytest.raises(ValueError, match="call_method"):
        program.written(graph)
