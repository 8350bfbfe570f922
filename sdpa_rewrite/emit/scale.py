"""The factor that a score is multiplied by before anything else."""

from __future__ import annotations

import math

from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.site import Site


def leading_factor(site: Site) -> tuple[Term, Term] | None:
    """The score program without that factor, and the factor; None where there is none, or the score is read twice."""
    hole = site.terms.hole("score", site.scores_axes)
    users = [t for t in subterms(site.score) if hole in t.args]
    if len(users) != 1 or users[0].op != "mul":
        return None
    factor = next((a for a in users[0].args if a is not hole), hole)
    return site.terms.substitute(site.score, {users[0]: hole}), factor


def finite_number(term: Term) -> float | None:
    """The value of a plain finite number."""
    if term.op == "number" and isinstance(term.attr, (int, float)) and math.isfinite(term.attr):
        return float(term.attr)
    return None
