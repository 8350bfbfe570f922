"""Values per row of the attention: factors and conditions beside the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from sdpa_rewrite.algebra.interpret import evaluate
from sdpa_rewrite.algebra.term import Term
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


def per_row(site: Site, inputs: Inputs, heads: Heads, term: Term) -> Tensor:
    """``term``, which does not vary along the columns, as (batch, heads, rows), of size one where it does not vary."""
    order = [*heads.batch, *heads.heads, *site.rows, *site.columns]
    world = inputs.world(site, order, logit_dtype(inputs))
    return grouped(site, heads, evaluate(term, world), world)[..., 0]
