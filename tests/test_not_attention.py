"""Near misses end to end: each is compiled, compared with eager, and not fused as what it is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import reasons, same_as_eager, statuses
from tests.test_cases_missed import qkv


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)) * 0.3


class Doubled(torch.autograd.Function):
    """The identity, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2.0


def doubled(x: Tensor) -> Tensor:
    return Doubled.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def clipped(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return x


def mixed(x: Tensor) -> Tensor:
    return torch.einsum("bhij,hg->bgij", x, torch.linspace(-1, 1, x.shape[1] ** 2).view(x.shape[1], -1).to(x.dtype))


def same(x: Tensor) -> Tensor:
    return x


def convolved(x: Tensor) -> Tensor:
    w = torch.linspace(-1, 1, x.shape[1] * 9).view(1, x.shape[1], 3, 3).expand(x.shape[1], -1, -1, -1)
    return F.conv2d(x, w.to(x.dtype), padding=1)


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "over the queries": (same, lambda s: s.softmax(-2)),
    "over the heads": (same, lambda s: s.softmax(1)),
    "mask after the softmax": (same, lambda s: s.softmax(-1) + torch.eye(s.shape[-1])),
    "heads mixed before": (mixed, lambda s: s.softmax(-1)),
    "heads mixed after": (same, lambda s: mixed(s.softmax(-1))),
    "top-k": (lambda s: s.masked_fill(s < s.topk(3, -1).values[..., -1:], -math.inf), lambda s: s.softmax(-1)),
    "convolution": (convolved, lambda s: s.softmax(-1)),
    "norm": (lambda s: F.layer_norm(s, s.shape[-1:]), lambda s: s.softmax(-1)),
    "transposed": (same, lambda s: s.softmax(-1).transpose(-2, -1)),
    "sigmoid": (same, torch.sigmoid),
    "relu": (same, lambda s: s.relu() / (1e-3 + s.relu().sum(-1, keepdim=True))),
    "squared": (same, lambda s: s.exp().square() / s.exp().sum(-1, keepdim=True)),
    "clamped below the maximum": (lambda s: (s - s.amax(-1, keepdim=True)).clamp(min=-0.5), lambda s: s.softmax(-1)),
    "renormalised": (same, lambda s: s.softmax(-1) / s.softmax(-1).square().sum(-1, keepdim=True)),
}
GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "scores' gradient doubled": (doubled, same),
    "probabilities' gradient doubled": (same, doubled),
    "scores' gradient clipped": (clipped, same),
    "half detached": (lambda s: s + s.detach(), same),
    "straight through": (same, lambda p: (p > 0.2).to(p.dtype) + p - p.detach()),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("also", ["mask made of the scores", "scores used twice"])
def test_any_function_of_the_scores_is_one_for_our_kernels(also: str, grad: bool) -> None:
    changes = {
        "mask made of the scores": lambda s: s.masked_fill(s < 0, -math.inf),
        "scores used twice": lambda s: s + s.square() * 0.1,
    }

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return changes[also](scores_of(q, k)).softmax(-1) @ v  # type: ignore[no-untyped-call, no-any-return]

    assert statuses(same_as_eager(function, *qkv(grad=grad))) == ["fused"]
    assert statuses(same_as_eager(function, *qkv(grad=grad), emitters=("sdpa",))) == ["recognised"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_another_function(name: str, grad: bool) -> None:
    before, normalise = CHANGES[name]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return normalise(before(scores_of(q, k))) @ v

    told = same_as_eager(function, *qkv(grad=grad))
    # clamping is pointwise once the shift is part of the softmax; what is fused must be what was written
    assert "fused" not in statuses(told)


@pytest.mark.parametrize("name", GRADIENTS)
def test_another_gradient(name: str) -> None:
    before, after = GRADIENTS[name]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return after(before(scores_of(q, k)).softmax(-1)) @ v

    assert "fused" not in statuses(same_as_eager(function, *qkv(grad=True)))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("also", ["returned", "averaged", "logged", "scores"])
def test_probabilities_or_scores_are_also_read(also: str, grad: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        scores = scores_of(q, k)
        p = scores.softmax(-1)
        return p @ v, {"returned": p, "averaged": p.mean(1), "logged": p.detach().amax(-1), "scores": scores}[also]

    told = same_as_eager(function, *qkv(grad=grad))
    assert "fused" not in statuses(told)
    assert "read by" in reasons(told)


@pytest.mark.parametrize("what", ["scores", "query", "key", "probabilities"])
def test_what_is_detached_gets_no_gradient(what: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores_of(q.detach() if what == "query" else q, k.detach() if what == "key" else k)
        p = (s.detach() if what == "scores" else s).softmax(-1)
        return (p.detach() if what == "probabilities" else p) @ v

    same_as_eager(function, *qkv(grad=True))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", ["roll", "flip", "first"])
def test_values_of_another_batch_stay_these_values(how: str, grad: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).softmax(-1) @ {"roll": v.roll(1, 0), "flip": v.flip(0), "first": v[:1]}[how]

    assert statuses(same_as_eager(function, *qkv(s=9, grad=grad))) == ["fused"]


def test_a_copy_larger_than_the_scores_is_no_gain() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q, k).softmax(-1) @ v[:1]

    told = same_as_eager(function, *qkv(s=6, d=8), emitters=("sdpa",))
    assert statuses(told) == ["recognised"]
    assert "larger than the scores" in reasons(told)


def test_a_mask_that_changes_in_place_after_the_forward() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        m = m.clone()
        out = (scores_of(q, k) + m).softmax(-1) @ v
        m.mul_(2.0)
        return out

    same_as_eager(function, *qkv(grad=True), torch.randn(6, 6))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("types", ["fbb", "bbf", "bff"])
def test_operands_of_different_types(types: str, grad: bool) -> None:
    """Cast where the user casts."""
    dtypes = [torch.float32 if t == "f" else torch.bfloat16 for t in types]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(q.float(), k.float()).softmax(-1).to(v.dtype) @ v

    same_as_eager(function, *(x.detach().to(t).requires_grad_(grad) for x, t in zip(qkv(), dtypes, strict=True)))


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("kind", ["complex", "integer"])
def test_inputs_that_are_not_real_numbers(kind: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return ((scores.real if scores.is_complex() else scores).to(v.dtype) * 0.01).softmax(-1) @ v

    q, k, v = qkv()
    if kind == "complex":
        q, k = torch.complex(q, k), torch.complex(k, v)
    else:
        q, k = (q * 4).long(), (k * 4).long()
    assert "fused" not in statuses(same_as_eager(function, q, k, v))


@pytest.mark.parametrize("half", [False, True])
def test_a_loss_is_no_candidate(half: bool) -> None:
    """The backward of cross entropy multiplies probabilities, of its own log_softmax, by the weights of the layer."""

    def loss(q: Tensor, k: Tensor, v: Tensor, w: Tensor, wanted: Tensor) -> Tensor:
        out = scores_of(q, k).softmax(-1) @ v
        return F.cross_entropy((out.transpose(1, 2).flatten(2) @ w).flatten(0, 1), wanted)

    dtype = torch.bfloat16 if half else torch.float32
    w = torch.randn(32, 11).to(dtype).requires_grad_()
    assert statuses(same_as_eager(loss, *qkv(grad=True, dtype=dtype), w, torch.randint(0, 11, (12,)))) == ["fused"]


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_nothing_to_attend(empty: str) -> None:
    b, s, t = (0 if empty == name else 3 for name in ("batch", "queries", "keys"))
    q, k, v = torch.randn(b, 4, s, 8), torch.randn(b, 4, t, 8), torch.randn(b, 4, t, 8)
    told = same_as_eager(lambda q, k, v: scores_of(q, k).softmax(-1) @ v, q, k, v)
    assert statuses(told) == ["missed"]
    assert "an axis has no positions" in reasons(told)


def test_a_forward_that_differs_is_told_before_its_gradients() -> None:
    """A softmax without a shift is NaN where a mask covers a row; its gradients differ too, but that explains less."""

    def unshifted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        e = (q @ k.mT * 0.3 + bias).exp()
        return e / e.sum(-1, keepdim=True) @ v

    told = same_as_eager(unshifted, *qkv(grad=True), torch.randn(6, 6))
    assert statuses(told) == ["missed"]
    assert "its meaning differs from the graph with fully masked rows" in reasons(told)
