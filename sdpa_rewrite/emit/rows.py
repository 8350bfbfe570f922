"""Values per row of the attention: factors and conditions beside the kernel."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from sdpa_rewrite.algebra.interpret import evaluate
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.emit.base import Inputs
from sdpa_rewrite.emit.heads import Heads, grouped
from sdpa_rewrite.site import Site


def logit_dtype(inputs: Inputs) -> torch.dtype:
    """The type that logits are computed in."""
    return torch.promote_types(torch.float32, inputs.tensors["query"][0].dtype)


def row_factor(site: Site) -> Term | None:
    """The weight program as a factor per row; None where it is more than that."""
    hole = site.terms.hole("probability", site.scores_axes)
    if site.weight is hole:
        return site.terms.number(1.0)
    if site.weight.op == "mul" and hole in site.weight.args:
        factor = next((a for a in site.weight.args if a is not hole), None)
        if factor is not None and not factor.axes & set(site.columns):
            return factor
    return None


def zeroed(site: Site) -> Term | None:
    """Where the score program gives -inf and the weight program 0; None where that is not one and the same place.

    A row of such places only is softmax's NaN, but the output is 0.  (None too where the softmax has no NaN.)
    """
    if site.softmax == "safe" or site.sink is not None:
        return None
    terms = site.terms
    hidden = _chosen(site.score, terms.number(-math.inf))
    blank = _chosen(site.weight, terms.number(0.0))
    if not blank or not blank <= hidden:
        return None
    found = [c if holds else terms.call("not", c) for c, holds in sorted(blank, key=lambda pair: pair[0].order)]
    return functools.reduce(lambda a, b: terms.call("or", a, b), found)


def other_infinities(site: Site) -> list[str]:
    """What may make a score -inf, in words, besides replacing it, where rows of -inf become 0 after the softmax.

    Where only some places of them become 0 (they are ``zeroed``), what replaces others counts too.
    """
    terms = site.terms
    blank = _chosen(site.weight, terms.number(0.0)) if zeroed(site) else _chosen(site.score, terms.number(-math.inf))
    found, seen, stack = [], set(), [site.score]
    types = {c.name: c.operand.node.meta["val"].dtype for c in site.captures}
    while stack:
        term = stack.pop()
        if term in seen:
            continue
        seen.add(term)
        if term.op == "number" and term.attr == -math.inf:
            found.append("another mask")
        elif term.op == "hole" and term.attr in types and types[term.attr].is_floating_point:
            found.append(str(term.attr))
        elif term.op == "where" and ((term.args[0], True) in blank or (term.args[0], False) in blank):
            stack.append(term.args[2] if (term.args[0], True) in blank else term.args[1])
        else:
            stack.extend(term.args)
    return found


def _chosen(program: Term, value: Term) -> set[tuple[Term, bool]]:
    """The conditions of ``program`` that choose ``value``, each with how it must come out."""
    return {(t.args[0], t.args[1] is value) for t in subterms(program) if t.op == "where" and value in t.args[1:]}


def per_row(site: Site, inputs: Inputs, heads: Heads, term: Term) -> Tensor:
    """``term``, which does not vary along the columns, as (batch, heads, rows), of size one where it does not vary."""
    order = [*heads.batch, *heads.heads, *site.rows, *site.columns]
    world = inputs.world(site, order, logit_dtype(inputs))
    return grouped(site, heads, evaluate(term, world), world)[..., 0]
