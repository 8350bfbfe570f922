"""The certificate: a site computes what the graph computes, shown on random data.

Forward: the graph's own terms and the reference meaning of the site agree.  Backward: every node that the adjoint
stage named is what autograd makes of the reference meaning.  Probabilistic identity testing, on generic values and
on special ones (rows masked as a whole, -inf, finite minima), with every condition that reads the scores seen on
both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_rewrite.algebra.interpret import evaluate
from sdpa_rewrite.algebra.term import Term, contains, subterms
from sdpa_rewrite.algebra.tiny import COMPARISONS, Inconsistent, TinyWorld, agree
from sdpa_rewrite.reference import attention
from sdpa_rewrite.site import Miss, Site

NOT_EVALUATED = (Inconsistent, RuntimeError, IndexError, KeyError, TypeError, ValueError)  # what evaluation may raise
GENERIC, SPECIAL, MOST = 2, 3, 12


@dataclass
class Draw:
    """One random world with the reference's inputs, output and (once a cotangent is known) gradients."""

    world: TinyWorld
    values: dict[str, Tensor]
    output: Tensor
    gradients: dict[str, Tensor]


def draw(site: Site, extra: Sequence[Term], seed: int, special: bool, grad: bool) -> Draw:
    """Evaluate the reference meaning of ``site`` on fresh random data."""
    inputs = {"query": site.query_term, "key": site.key_term, "value": site.value_term}
    generic = {t.attr[0] for t in inputs.values() if t.op == "leaf"}
    if site.cotangent_term is not None:
        generic |= {t.attr[0] for t in subterms(site.cotangent_term) if t.op == "leaf"}
    world = TinyWorld([site.result_term, *inputs.values(), *extra], site.columns, generic, seed, special)
    values = {name: evaluate(term, world) for name, term in inputs.items()}
    values |= {c.name: evaluate(c.term, world) for c in site.captures}
    if grad:
        values = {n: v.detach().requires_grad_() if v.is_floating_point() else v for n, v in values.items()}
    with torch.set_grad_enabled(grad):
        output = attention(site, world, values)
    return Draw(world, values, output, {})


def forward(site: Site) -> None:
    """Raise ``Miss`` unless the site's meaning is what its output node computes."""
    watched = [t for t in subterms(site.result_term) if t.op in COMPARISONS and contains(t, site.scores_term)]
    seen: dict[Term, set[bool]] = {t: set() for t in watched}
    for k in range(GENERIC + MOST):
        special = k >= GENERIC
        if k >= GENERIC + SPECIAL and all(len(s) == 2 for s in seen.values()):
            return
        try:
            trial = draw(site, (), seed=k, special=special, grad=False)
            original = evaluate(site.result_term, trial.world)
        except NOT_EVALUATED as error:
            raise Miss(f"cannot be evaluated on a small instance: {error}", "proof", site.softmax_node) from error
        difference = agree(original, trial.output)
        if difference is not None:
            kind = "with fully masked rows" if special else "on random data"
            raise Miss(f"its meaning differs from the graph {kind}, by {difference:.3g}", "proof", site.softmax_node)
        for term, sides in seen.items():
            value = trial.world.values.get(term)
            if value is not None:
                sides.update(bool(v) for v in value.unique())
    stuck = next((t for t, sides in seen.items() if len(sides) < 2), None)
    if stuck is not None:
        raise Miss(f"a condition on the scores never changed in {MOST} draws: {stuck}", "proof", stuck.node)


def gradients_of(trial: Draw, cotangent: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Autograd of the reference meaning at ``names``; a role that the output does not depend on has no entry."""
    wanted = [n for n in names if trial.values[n].requires_grad]
    if not trial.output.requires_grad or not wanted:
        return {}
    cotangent = cotangent.expand_as(trial.output).to(trial.output.dtype)
    got = torch.autograd.grad(trial.output, [trial.values[n] for n in wanted], cotangent, allow_unused=True)
    return {n: g for n, g in zip(wanted, got, strict=True) if g is not None}
