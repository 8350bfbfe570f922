"""The certificate refuses what differs, however little of it differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdpa_rewrite import prove
from sdpa_rewrite.algebra.linear import is_linear
from sdpa_rewrite.algebra.term import Term, Terms, contains
from sdpa_rewrite.site import Miss, Site
from tests.joint import tensors, the_site


def masked(fill: float) -> Callable[..., Tensor]:
    return lambda q, k, v, m: (q @ k.mT * 0.5).masked_fill(m, fill).softmax(-1) @ v


@pytest.fixture
def site() -> Site:
    return the_site(masked(float("-inf")), *tensors(), torch.randn(8, 8) > 0)


def test_the_site_itself_passes(site: Site) -> None:
    prove.forward(site)


@pytest.mark.parametrize(
    "change",
    [
        lambda site, t: t.call("mul", site.score, t.number(1.0001)),
        lambda site, t: t.substitute(site.score, {t.number(float("-inf")): t.number(-3.4e38)}),
        lambda site, t: t.substitute(site.score, {t.number(0.5): t.number(0.25)}),
        lambda site, t: t.call("not", site.score.args[0]) and site.score.args[2],
    ],
    ids=["scale", "finite fill", "other scale", "no mask"],
)
def test_another_score_program_is_refused(site: Site, change: Callable[[Site, Terms], Term]) -> None:
    with pytest.raises(Miss, match="its meaning differs from the graph"):
        prove.forward(replace(site, score=change(site, site.terms)))


def test_another_softmax_is_refused(site: Site) -> None:
    with pytest.raises(Miss, match="its meaning differs"):
        prove.forward(replace(site, softmax="safe"))
    with pytest.raises(Miss, match="its meaning differs"):
        prove.forward(replace(site, sink=site.terms.number(0.0)))


def test_a_threshold_far_away_is_reached() -> None:
    """The clamp is dropped: it shows only with scores beyond 5e4."""
    found = the_site(lambda q, k, v: (q @ k.mT).clamp(-5e4, 5e4).softmax(-1) @ v, *tensors())
    with pytest.raises(Miss, match="its meaning differs"):
        prove.forward(replace(found, score=found.terms.hole("score", found.scores_axes)))


def test_a_relation_of_indices_may_be_forced() -> None:
    """A window wider than any row that is drawn: both outcomes are tried all the same."""

    def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(8)
        return (q @ k.mT).masked_fill((i[None] - i[:, None]) > 100, float("-inf")).softmax(-1) @ v

    found = the_site(window, *tensors())
    with pytest.raises(Miss, match="its meaning differs"):
        prove.forward(replace(found, score=found.terms.hole("score", found.scores_axes)))


@pytest.mark.parametrize(
    ("make", "linear"),
    [
        (lambda t, g, s: g, True),
        (lambda t, g, s: t.call("mul", g, t.call("exp", s)), True),
        (lambda t, g, s: t.call("add", g, t.call("mul", g, s)), True),
        (lambda t, g, s: t.call("div", g, s), True),
        (lambda t, g, s: t.call("where", t.call("lt", s, t.number(0)), g, t.number(0.0)), True),
        (lambda t, g, s: t.call("mul", g, g), False),
        (lambda t, g, s: t.call("div", s, g), False),
        (lambda t, g, s: t.call("add", g, t.number(1e-30)), False),
        (lambda t, g, s: t.call("minimum", g, t.number(1e30)), False),
        (lambda t, g, s: t.call("where", t.call("lt", g, t.number(1e30)), g, t.number(0.0)), False),
        (lambda t, g, s: t.apply(torch.ops.aten.abs.default, ((), ()), g), False),
        (lambda t, g, s: t.call("mul", g, t.apply(torch.ops.aten.relu.default, ((), ()), s)), False),
    ],
)
def test_linear_in_the_cotangent(site: Site, make: Callable[[Terms, Term, Term], Term], linear: bool) -> None:
    terms = site.terms
    term = make(terms, site.value_term, site.scores_term)
    assert is_linear(term, [site.value_term], set(), lambda t: contains(t, site.scores_term)) is linear


def test_linear_in_two_cotangents_together(site: Site) -> None:
    g, h, terms = site.value_term, site.query_term, site.terms
    assert is_linear(terms.call("add", g, h), [g, h], set(), lambda t: False)
    assert not is_linear(terms.call("add", g, h), [g], set(), lambda t: False)
    assert not is_linear(terms.call("mul", g, h), [g, h], set(), lambda t: False)
