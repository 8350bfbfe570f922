"""Dropout on the probabilities, as Inductor's graphs have it: p * (rand > rate) / (1 - rate)."""

from __future__ import annotations

import math

from torch.fx import Node

from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.lift.ops import opname
from sdpa_rewrite.site import Site


def dropout_rate(site: Site) -> float | None:
    """The rate when the weight program is a dropout and nothing else, by a mask that nobody else reads; else None."""
    hole = site.terms.hole("probability", site.scores_axes)
    terms = {site.terms.hole(c.name, c.operand.axes): c for c in site.captures}
    factors = _factors(site.weight)
    masks = [terms[f] for f in factors if f in terms]
    if len(factors) != 3 or hole not in factors or len(masks) != 1:
        return None
    drawn = _drawn(masks[0].term)
    numbers = [f.attr for f in factors if f.op == "number" and isinstance(f.attr, float)]
    if drawn is None or len(numbers) != 1 or masks[0].operand.axes != site.scores_axes:
        return None
    rate, rand = drawn
    shared = _forward_readers(rand) > 1 or _forward_readers(masks[0].operand.node) > 1
    return None if shared or not math.isclose(numbers[0], 1.0 / (1.0 - rate), rel_tol=1e-6) else rate


def _factors(term: Term) -> list[Term]:
    return [f for a in term.args for f in _factors(a)] if term.op == "mul" else [term]


def _drawn(mask: Term) -> tuple[float, Node] | None:
    """rate < rand: the rate, and the node that draws."""
    mask = mask.args[0] if mask.op == "float" else mask
    if mask.op != "lt" or mask.args[0].op != "number" or mask.args[1].op != "leaf":
        return None
    rate, node = mask.args[0].attr, mask.args[1].attr[0]
    return (float(rate), node) if opname(node) in ("rand", "rand_like") and 0 < rate < 1 else None


def _forward_readers(node: Node) -> int:
    return sum(user.meta.get("partitioner_tag") != "is_backward" for user in node.users)
