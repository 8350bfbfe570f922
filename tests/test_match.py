"""Roles, scales, masks, sinks and layouts, whatever the spelling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from sdpa_rewrite.algebra.axes import product
from sdpa_rewrite.algebra.term import subterms
from sdpa_rewrite.site import Site
from tests.joint import tensors, the_site

Program = Callable[..., Any]


def scale_of(site: Site) -> Any:
    """The number that multiplies the scores in ``mul(score, number)``; 1 for the bare scores."""
    if site.score.op == "hole":
        return 1
    assert site.score.op == "mul"
    (number,) = (a for a in site.score.args if a.op == "number")
    return number.attr


def hand_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT * 0.5
    e = (s - s.max(-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True) @ v


SPELLINGS: dict[str, Program] = {
    "multiplied": lambda q, k, v: (q @ k.mT * 0.5).softmax(-1) @ v,
    "divided": lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v,
    "twice": lambda q, k, v: (0.25 * (q @ k.mT * 2)).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhje->bhie", torch.einsum("bhid,bhjd->bhij", q, k).mul(0.5).softmax(-1), v
    ),
    "flattened": lambda q, k, v: torch.bmm(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).mul(0.5).softmax(-1), v.flatten(0, 1)
    ).view(2, 3, 8, 4),
    "by hand": hand_written,
    "reciprocal": lambda q, k, v: ((e := (q @ k.mT * 0.5).exp()) * e.sum(-1, keepdim=True).reciprocal()) @ v,
    "log-softmax": lambda q, k, v: (q @ k.mT * 0.5).log_softmax(-1).exp() @ v,
    "keys first": lambda q, k, v: (k @ q.mT * 0.5).mT.softmax(-1) @ v,
    "values transposed": lambda q, k, v: (v.mT @ (q @ k.mT * 0.5).softmax(-1).mT).mT,
    "float64 softmax": lambda q, k, v: (q @ k.mT * 0.5).softmax(-1, dtype=torch.float64).to(q.dtype) @ v,
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_does_not_matter(name: str, grad: bool) -> None:
    site = the_site(SPELLINGS[name], *tensors(grad=grad))
    assert scale_of(site) == 0.5
    assert [product(d) for d in (site.rows, site.columns, site.depth, site.width)] == [8, 8, 4, 4]
    assert product(site.batch) == 6
    assert str(site.weight) == "<probability>"
    assert site.softmax == "softmax"
    assert {g.role for g in site.gradients} == ({"query", "key", "value"} if grad else set())


@pytest.mark.parametrize("scale", [1.0, 0.3, 5])
def test_the_scale_is_the_users(scale: float) -> None:
    site = the_site(lambda q, k, v: (q @ k.mT * scale).softmax(-1) @ v, *tensors())
    assert scale_of(site) == scale


@pytest.mark.parametrize("root", [lambda q: math.sqrt(q.size(-1)), lambda q: q.size(-1) ** 0.5], ids=["sqrt", "power"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_symbolic_scale_is_an_expression_of_the_size(root: Callable[[Tensor], float], grad: bool) -> None:
    site = the_site(lambda q, k, v: (q @ k.mT / root(q)).softmax(-1) @ v, *tensors(grad=grad), dynamic=True)
    scale = scale_of(site)
    assert isinstance(scale, sympy.Expr)
    (symbol,) = scale.free_symbols
    assert float(scale.subs(symbol, 16)) == pytest.approx(0.25)
    assert site.depth[0].size == symbol


def test_a_learned_scale_is_a_capture_with_a_gradient() -> None:
    tau = torch.tensor(1.5, requires_grad=True)
    site = the_site(lambda q, k, v, t: (q @ k.mT * t).softmax(-1) @ v, *tensors(grad=True), tau)
    assert [c.operand.axes for c in site.captures] == [frozenset()]
    assert "capture0" in {g.role for g in site.gradients}


def test_grouped_heads() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(3, 1) for x in (k, v))
        return (q @ k.mT).softmax(-1) @ v

    q, k, v = torch.randn(2, 6, 8, 4), torch.randn(2, 2, 8, 4), torch.randn(2, 2, 8, 4)
    site = the_site(program, *(x.requires_grad_() for x in (q, k, v)))
    group = [a for a in site.batch if a not in site.key.axes]
    assert product(group) == 3
    assert site.key.node.op == "placeholder", "the repeat is not materialised"
    assert {g.role for g in site.gradients} == {"query", "key", "value"}


def test_cross_attention_of_other_sizes() -> None:
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 6)
    site = the_site(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k, v)
    assert [product(d) for d in (site.rows, site.columns, site.depth, site.width)] == [5, 9, 4, 6]


@pytest.mark.parametrize("shape", [(1, 3, 8, 4), (2, 1, 8, 4), (1, 1, 8, 4)])
def test_axes_of_one(shape: tuple[int, ...]) -> None:
    assert the_site(SPELLINGS["multiplied"], *tensors(*shape, grad=True)).training


def test_a_causal_mask_of_indices_needs_no_tensor() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(8)
        return (q @ k.mT).masked_fill(i[None] > i[:, None], float("-inf")).softmax(-1) @ v

    site = the_site(program, *tensors(grad=True))
    assert site.captures == ()
    assert {t.op for t in subterms(site.score)} >= {"index", "lt", "where"}


def test_torchs_own_decomposition_with_a_safe_softmax() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def program(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, m)[0]

    site = the_site(program, *tensors(), torch.randn(8, 8) > 0)
    assert site.softmax == "safe"


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_sink_is_an_extra_logit(grad: bool) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        logits = torch.cat([q @ k.mT, sink.view(1, 3, 1, 1).expand(2, 3, 8, 1)], -1)
        logits = logits - logits.max(-1, keepdim=True).values
        return logits.softmax(-1)[..., :-1] @ v

    site = the_site(program, *tensors(grad=grad), torch.randn(3, requires_grad=grad))
    assert str(site.sink) == "<capture0>"
    assert {g.role for g in site.gradients} == ({"query", "key", "value", "capture0"} if grad else set())


@pytest.mark.parametrize(("extra", "logit"), [(1.0, 0.0), (1e-6, math.log(1e-6))])
def test_a_number_added_to_the_sum_is_a_sink(extra: float, logit: float) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = (q @ k.mT).exp()
        return e / (e.sum(-1, keepdim=True) + extra) @ v

    site = the_site(program, *tensors(grad=True))
    assert site.sink is not None
    assert site.sink.attr == pytest.approx(logit)


def test_dropout_is_a_weight_program() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.dropout((q @ k.mT).softmax(-1), 0.1) @ v

    site = the_site(program, *tensors(grad=True))
    assert str(site.score) == "<score>"
    assert site.weight.op == "mul"
    assert {g.role for g in site.gradients} == {"query", "key", "value"}


def test_one_buffer_as_query_key_and_value() -> None:
    site = the_site(lambda x: (x @ x.mT).softmax(-1) @ x, torch.randn(2, 3, 8, 4))
    assert site.query.node is site.key.node is site.value.node
