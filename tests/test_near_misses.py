"""What looks like attention and is not, or is only what it is: each with the reason, or with the site it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite.site import Miss, Site
from tests.joint import analysed, tensors, the_miss, the_site

Program = Callable[..., Any]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1)


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    return scores(q, k).softmax(-1)


def probs_and_output(read: Callable[[Tensor], Tensor]) -> Program:
    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = probabilities(q, k)
        return p @ v, read(p)

    return program


def scores_and_output(read: Callable[[Tensor], Tensor]) -> Program:
    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = scores(q, k)
        return s.softmax(-1) @ v, read(s)

    return program


def top_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s.masked_fill(s < s.topk(3, -1).values[..., -1:], -1e9).softmax(-1) @ v


def symmetric(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s + s.transpose(-2, -1)).softmax(-1) @ v


def two_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.cat([scores(q, k), scores(q, v)], -1).softmax(-1)
    return p[..., :8] @ k + p[..., 8:] @ v


NEVER = {  # wrong with and without gradients
    "over the queries": (lambda q, k, v: scores(q, k).softmax(-2) @ v, "normalised over axes of sizes 8, but"),
    "over the heads": (lambda q, k, v: scores(q, k).softmax(1) @ v, "normalised over axes of sizes 3, but"),
    "over the batch": (lambda q, k, v: scores(q, k).softmax(0) @ v, "normalised over axes of sizes 2, but"),
    "probabilities returned": (probs_and_output(lambda p: p), "probabilities are also read by output"),
    "probabilities averaged": (probs_and_output(lambda p: p.mean(1)), "probabilities are also read by output, through"),
    "scores returned": (scores_and_output(lambda s: s), "scores are also read by output"),
    "scores summed": (scores_and_output(lambda s: s.sum()), "scores are also read by output, through"),
    "heads mixed before": (
        lambda q, k, v: torch.einsum("bhij,hg->bgij", scores(q, k), v[0, :, :3, 0]).softmax(-1) @ v,
        "each query has keys of its own",
    ),
    "heads mixed after": (
        lambda q, k, v: torch.einsum("bhij,hg->bgij", probabilities(q, k), v[0, :, :3, 0]) @ v,
        "normalised over axes of sizes 8, but contracted over axes of sizes 3",
    ),
    "top-k": (top_k, "scores are also read by aten.topk"),
    "a norm between": (lambda q, k, v: F.layer_norm(scores(q, k), (8,)).softmax(-1) @ v, "read by aten.var_mean"),
    "values contracted over the queries": (
        lambda q, k, v: probabilities(q, k).transpose(-2, -1) @ v,
        "normalised over axes of sizes 8, but",
    ),
    "a running sum of the scores": (
        lambda q, k, v: scores(q, k).cumsum(-1).softmax(-1) @ v,
        "pass through aten.cumsum",
    ),
    "scores turned round": (lambda q, k, v: scores(q, k).flip(-1).softmax(-1) @ v, "pass through prims.rev"),
    "scores and their transpose": (symmetric, "scores are also read along other axes"),
    "probabilities used twice": (lambda q, k, v: (p := probabilities(q, k)) @ v + p @ q, "probabilities are also read"),
    "one softmax over two key tensors": (two_values, "one softmax runs over several key tensors"),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", NEVER)
def test_it_is_left_alone(name: str, grad: bool) -> None:
    program, reason = NEVER[name]
    found = analysed(program, *tensors(grad=grad))
    assert found
    assert all(isinstance(f, Miss) for f in found), found
    assert any(reason in str(f) for f in found), [str(f) for f in found]


@pytest.mark.parametrize("name", ["sigmoid", "ReLU, normalised"])
def test_no_softmax_is_no_candidate(name: str) -> None:
    def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).sigmoid() @ v

    def relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.normalize(scores(q, k).relu(), p=1.0, dim=-1) @ v

    assert analysed(sigmoid if name == "sigmoid" else relu, *tensors()) == []


class Backward(torch.autograd.Function):
    """The identity, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.way = way
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,), (g,) = ctx.saved_tensors, grads
        if ctx.way == "doubled":
            return g * 2, None
        if ctx.way == "clipped far away":
            return g.clamp(-1e4, 1e4), None
        if ctx.way == "blocked for huge scores":
            return torch.where(x > 1e6, 0 * g, g), None
        if ctx.way == "blocked for far columns":
            return torch.where(torch.arange(g.shape[-1]) > 1000, 0 * g, g), None
        return g, None


@pytest.mark.parametrize("way", ["doubled", "clipped far away", "blocked for huge scores", "blocked for far columns"])
@pytest.mark.parametrize("where", ["scores", "probabilities"])
def test_a_gradient_of_the_users_own(way: str, where: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        if where == "scores":
            return Backward.apply(s, way).softmax(-1) @ v
        return Backward.apply(s.softmax(-1), way) @ v

    miss = the_miss(program, *tensors(grad=True))
    assert "differs from the gradient of the" in str(miss)
    assert isinstance(analysed(program, *tensors())[0], Site), "without gradients it is attention"


def test_a_gradient_of_the_users_own_that_changes_nothing() -> None:
    site = the_site(lambda q, k, v: Backward.apply(scores(q, k), "same").softmax(-1) @ v, *tensors(grad=True))
    assert {g.role for g in site.gradients} == {"query", "key", "value"}


def test_straight_through() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = probabilities(q, k)
        return (p + ((p > 0.5).float() - p).detach()) @ v

    assert "differs from the gradient of the" in str(the_miss(program, *tensors(grad=True)))


def test_a_detached_sum() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = scores(q, k).exp()
        return e / e.sum(-1, keepdim=True).detach() @ v

    assert "differs from the gradient of the" in str(the_miss(program, *tensors(grad=True)))


def test_a_detached_maximum_changes_nothing() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        e = (s - s.amax(-1, keepdim=True).detach()).exp()
        return e / e.sum(-1, keepdim=True) @ v

    assert {g.role for g in the_site(program, *tensors(grad=True)).gradients} == {"query", "key", "value"}


@pytest.mark.parametrize(
    ("program", "roles"),
    [
        (lambda q, k, v: scores(q.detach(), k).softmax(-1) @ v, {"key", "value"}),
        (lambda q, k, v: scores(q, k).detach().softmax(-1) @ v, {"value"}),
        (lambda q, k, v: probabilities(q, k) @ v.detach(), {"query", "key"}),
    ],
    ids=["query", "scores", "value"],
)
def test_what_is_detached_has_no_gradient(program: Program, roles: set[str]) -> None:
    assert {g.role for g in the_site(program, *tensors(grad=True)).gradients} == roles


@pytest.mark.parametrize(
    ("program", "score", "weight"),
    [
        (lambda q, k, v, m: (probabilities(q, k) + m) @ v, "<score>", "add(<probability>, <capture0>)"),
        (lambda q, k, v, m: (probabilities(q, k) * m) @ v, "<score>", "mul(<probability>, <capture0>)"),
        (lambda q, k, v, m: (scores(q, k) * m).softmax(-1) @ v, "mul(<score>, <capture0>)", "<probability>"),
        (
            lambda q, k, v, m: ((scores(q, k) + m) * 3).softmax(-1) @ v,
            "add(mul(3, <score>), mul(3, <capture0>))",
            "<probability>",
        ),
    ],
    ids=["added after", "multiplied after", "multiplied before", "scaled with the scores"],
)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_mask_is_what_it_is(program: Program, score: str, weight: str, grad: bool) -> None:
    site = the_site(program, *tensors(grad=grad), torch.randn(8, 8))
    assert (_sorted(str(site.score)), _sorted(str(site.weight))) == (_sorted(score), _sorted(weight))


def _sorted(text: str) -> list[str]:
    """The pieces of a term, whatever order commuting operands have."""
    return sorted(text.replace("(", " ").replace(")", " ").replace(",", " ").split())


def test_dropout_before_the_softmax_is_a_score_program() -> None:
    site = the_site(lambda q, k, v: F.dropout(scores(q, k), 0.5).softmax(-1) @ v, *tensors(grad=True))
    assert str(site.weight) == "<probability>"
    assert site.captures[0].operand.node.meta["val"].dtype == torch.bool


@pytest.mark.parametrize(("dtype", "word"), [(torch.int64, "int64"), (torch.complex64, "complex")])
def test_types_that_are_not_floating(dtype: torch.dtype, word: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        return (s.real if s.is_complex() else s).float().softmax(-1) @ v

    q, k = (torch.ones(2, 3, 8, 4).to(dtype) for _ in range(2))
    found = analysed(program, q, k, torch.randn(2, 3, 8, 4))
    assert all(isinstance(f, Miss) for f in found)
    assert all(word in str(f) or "pass through" in str(f) for f in found), [str(f) for f in found]


def test_an_axis_without_positions() -> None:
    found = analysed(lambda q, k, v: probabilities(q, k) @ v, torch.randn(2, 3, 0, 4), *tensors(count=2))
    assert all(isinstance(f, Miss) for f in found)


def test_a_users_row_constant_is_kept() -> None:
    """It cancels in the softmax unless it is infinite; then it makes the row NaN."""

    def program(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
        return (scores(q, k) + row[:, None]).softmax(-1) @ v

    assert len(the_site(program, *tensors(), torch.randn(8)).captures) == 1
