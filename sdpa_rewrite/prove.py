"""The certificate: a site computes what the graph computes, shown on random data.

Forward: the graph's own terms and the reference meaning of the site agree.  Backward: every node that the adjoint
stage named is what autograd makes of the reference meaning.  Probabilistic identity testing, on generic values and
on special ones (rows masked as a whole, -inf, finite minima), in several sizes.

A proof must not be vacuous.  Every condition (a comparison, a maximum) is to be seen on both sides.  One that reads
the scores is driven there by scores of all magnitudes.  One that does not (a relation of indices, say) may be set at
will instead: what holds for any outcome of a condition holds for the outcome it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_rewrite.algebra.interpret import evaluate
from sdpa_rewrite.algebra.linear import is_linear
from sdpa_rewrite.algebra.term import Term, contains, subterms
from sdpa_rewrite.algebra.tiny import Inconsistent, TinyWorld, agree, can_shrink
from sdpa_rewrite.algebra.watch import Watch, conditions, magnitudes
from sdpa_rewrite.reference import attention
from sdpa_rewrite.site import Miss, Operand, Site

NOT_EVALUATED = (Inconsistent, RuntimeError, IndexError, KeyError, TypeError, ValueError)  # what evaluation may raise
GENERIC, SPECIAL, MOST = 2, 3, 8  # draws: generic values, special values, and more while a condition is undecided
ROUNDING, EPS, LARGEST = 1e-8, torch.finfo(torch.float64).eps, 1e10
Values = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Claim:
    """``term`` is the gradient of ``role``, of which ``operand`` is the tensor."""

    term: Term
    role: str
    operand: Operand


@dataclass(frozen=True)
class Draw:
    """How one world is drawn.

    ``pinned``: the scores are given values of their own, up to infinity, instead of the contraction's.
    ``forced``: these conditions get random outcomes.
    """

    seed: int
    special: bool = False
    pinned: bool = False
    forced: tuple[Term, ...] = ()


@dataclass
class Trial:
    """One random world with the reference's inputs and output."""

    world: TinyWorld
    values: dict[str, Tensor]
    output: Tensor


def try_out(site: Site, draw: Draw, extra: Sequence[Term] = (), wide: Mapping[str, Operand] | None = None) -> Trial:
    """Evaluate the reference meaning of ``site`` on fresh random data; ``wide``: roles that gradients are wanted of."""
    inputs = {"query": site.query_term, "key": site.key_term, "value": site.value_term}
    generic = {t.attr[0] for t in inputs.values() if t.op == "leaf"}
    if site.cotangent_term is not None:
        generic |= {t.attr[0] for t in subterms(site.cotangent_term) if t.op == "leaf"}
    world = TinyWorld([site.result_term, *inputs.values(), *extra], site.columns, generic, draw.seed, draw.special)
    for term in sorted(draw.forced, key=lambda t: t.order):
        world.force(term)
    values = {name: evaluate(term, world) for name, term in inputs.items()}
    values |= {c.name: world.expanded(evaluate(c.term, world), c.operand.axes) for c in site.captures}
    for role, operand in (wide or {}).items():
        values[role] = world.expanded(values[role], operand.axes).detach().clone().requires_grad_()
    scores = None
    if draw.pinned:
        limits = magnitudes(t for t in conditions([site.result_term]) if contains(t, site.scores_term))
        scores = world.extreme(site.scores_term, limits)
        world.values[site.scores_term] = scores
    with torch.set_grad_enabled(bool(wide)):
        return Trial(world, values, attention(site, world, values, scores))


def tolerance(site: Site) -> float:
    """How far two evaluations of the same function may be apart, of the largest value.

    A score beside a mask of -1e9 is rounded to 1e-7, and where a row is masked as a whole its probabilities are only as
    good as that.  Larger masks either swallow the score or get no such allowance.
    """
    found = (t.attr for t in subterms(site.result_term) if t.op == "number")
    numbers = [abs(n) for n in found if isinstance(n, float)]
    return max(ROUNDING, 8 * EPS * max((n for n in numbers if n <= LARGEST), default=0.0))


def _of_scores(watch: Watch, site: Site) -> list[Term]:
    """Conditions on the scores that have had one outcome only."""
    return [t for t in watch.open if contains(t, site.scores_term)]


def draws(watch: Watch, site: Site) -> Iterable[Draw]:
    """The worlds of a proof: a fixed few, then more for conditions that have shown one side only."""
    for seed in range(GENERIC + SPECIAL):
        yield Draw(seed, special=seed >= GENERIC)
    for seed in range(GENERIC + SPECIAL, MOST):
        if _of_scores(watch, site):
            yield Draw(seed, special=True, pinned=True)
    forced = tuple(t for t in watch.open if not contains(t, site.scores_term))
    if forced:
        yield Draw(MOST, forced=forced)
        yield Draw(MOST + 1, special=True, forced=forced)


def forward(site: Site) -> None:
    """Raise ``Miss`` unless the site's meaning is what its output node computes."""
    watch = Watch([site.result_term])
    for draw in draws(watch, site):
        try:
            trial = try_out(site, draw)
            original = evaluate(site.result_term, trial.world)
        except NOT_EVALUATED as error:
            raise Miss(f"cannot be evaluated on a small instance: {error}", "proof", site.softmax_node) from error
        difference = agree(original, trial.output, tolerance(site))
        if difference is not None:
            kind = "with fully masked rows" if draw.special else "on random data"
            raise Miss(f"its meaning differs from the graph {kind}, by {difference:.3g}", "proof", site.softmax_node)
        watch.note(trial.world)
    for stuck in _of_scores(watch, site):
        raise Miss(f"a condition on the scores never changed in {MOST} draws: {stuck}", "proof", stuck.node)


def gradients(site: Site, claims: Sequence[Claim]) -> list[Claim]:
    """The claims that hold: on every draw, and linear in the cotangent by construction."""
    assert site.cotangent_term is not None
    base = [site.result_term, site.cotangent_term]
    own = set(subterms(site.result_term))
    left = [c for c in claims if is_linear(c.term, [site.cotangent_term], own, lambda t: contains(t, site.scores_term))]
    left = [c for c in left if can_shrink([*base, c.term])]
    for seed in range(2):  # most claims are refuted at once: what is left is looked at more closely
        left = _agreeing(site, Draw(seed), left)
    watch = Watch([site.result_term, *(c.term for c in left)])
    for draw in draws(watch, site):
        left = _agreeing(site, draw, left, watch)
    stuck = set(_of_scores(watch, site))
    return [c for c in left if not any(t in stuck for t in subterms(c.term))]


def _agreeing(site: Site, draw: Draw, claims: list[Claim], watch: Watch | None = None) -> list[Claim]:
    if not claims:
        return []
    assert site.cotangent_term is not None
    widest: dict[str, Operand] = {}
    for claim in claims:
        if claim.role not in widest or len(widest[claim.role].axes) < len(claim.operand.axes):
            widest[claim.role] = claim.operand
    try:
        trial = try_out(site, draw, [site.cotangent_term, *(c.term for c in claims)], widest)
        cotangent = evaluate(site.cotangent_term, trial.world)
        found = _autograd(trial, cotangent, list(widest))
        kept = []
        for claim in claims:
            value = evaluate(claim.term, trial.world)
            target = found.get(claim.role)
            if target is None:
                continue
            extra = [trial.world.position[a] for a in widest[claim.role].axes - claim.operand.axes]
            target = target.sum(extra, keepdim=True) if extra else target
            if agree(trial.world.expanded(value, claim.operand.axes), target, tolerance(site)) is None:
                kept.append(claim)
    except NOT_EVALUATED as error:
        raise Miss(f"the backward cannot be evaluated on a small instance: {error}", "backward") from error
    if watch is not None:
        watch.note(trial.world)
    return kept


def _autograd(trial: Trial, cotangent: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Autograd of the reference meaning at ``names``; a role that the output does not depend on has no entry."""
    if not trial.output.requires_grad:
        return {}
    cotangent = cotangent.expand_as(trial.output).to(trial.output.dtype)
    got = torch.autograd.grad(trial.output, [trial.values[n] for n in names], cotangent, allow_unused=True)
    return {n: g for n, g in zip(names, got, strict=True) if g is not None}
