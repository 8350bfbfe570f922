"""Where ATen's kernels mean something else by a mask than what the user wrote, put right at the cost of the rows.

- A row whose logits are all -inf: ATen gives 0, softmax as written NaN.  Where -inf was *added*, the gradients of the
  row are NaN too: its query becomes NaN.  Where scores were *replaced* by -inf, no gradient reaches them; the row's
  output becomes NaN, and so do the gradients of all values.  (Where some were replaced and to others it was added, all
  count as added.)
- A row filled as a whole with a finite value does not depend on the scores: its query becomes zero.
- The backward recomputes the probabilities from the row's logsumexp.  Beside a mask of -1e9 the sum is rounded away.
  Such a mask is shifted, which softmax does not notice.  A mask so low that it swallows the scores (``finfo.min``)
  must stay, for it makes the row uniform; the backward then takes each of the n largest probabilities for 1 instead
  of 1 / n, all its gradients are n times too large, and the cotangent is divided by n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_rewrite.algebra.interpret import evaluate
from sdpa_rewrite.emit.affine import ABSORBS, Affine, may_be_infinite, may_mask
from sdpa_rewrite.emit.arrange import RealWorld
from sdpa_rewrite.emit.heads import Heads, grouped
from sdpa_rewrite.site import Site

INFINITY = float("inf")
FAR = 1e3  # a logsumexp beside a smaller mask keeps the precision of the scores


@dataclass(frozen=True)
class Masked:
    """A query and an additive mask for the kernel, and what its output needs afterwards, per row."""

    query: Tensor
    mask: Tensor | None = None
    empty: Tensor | None = None  # rows whose output is NaN
    share: Tensor | None = None  # what the cotangent is multiplied by

    def finished(self, out: Tensor, value: Tensor) -> Tensor:
        """The kernel's output put right; ``value`` has fewer heads where they are grouped."""
        if self.share is not None:
            share = self.share.to(out.dtype)
            out = out * share + (out * (1.0 - share)).detach()
        if self.empty is None:
            return out
        total = value.sum(-2, keepdim=True)
        group = out.shape[1] // total.shape[1]
        if group != 1:
            total = total.repeat_interleave(group, dim=1)
        zero = torch.zeros((), dtype=out.dtype, device=out.device)
        # 0 + 0 in other rows, and 0 as gradient; here NaN, and NaN as gradient of each value
        return out + torch.where(self.empty, total, zero) * torch.where(self.empty, math.nan, zero)


def masked(site: Site, form: Affine, heads: Heads, world: RealWorld, q: Tensor) -> Masked:
    """The mask of ``form``, and the query with rows that are masked as a whole put right."""
    if form.mask is None:
        return Masked(q)
    mask = grouped(site, heads, evaluate(form.mask, world), world)
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    mask = mask if mask.dtype == q.dtype else mask.to(wide)
    q = _uniform_rows(site, form, heads, world, q, mask)
    share, empty = None, None
    if site.softmax == "softmax" and site.sink is None and may_be_infinite(site, form.mask):
        empty = (mask == -INFINITY).all(-1, keepdim=True)
        if not site.training:
            q, empty = _poisoned(q, empty), None
        elif any(may_be_infinite(site, b) for b in form.bias):
            filled = _filled(site, form, heads, world)
            filled = filled.all(-1, keepdim=True) if filled is not None else torch.zeros_like(empty)
            q, empty = _poisoned(q, empty & ~filled), empty & filled if form.fills else None
    if site.training and (any(f.finite for f in form.fills) or any(may_mask(site, b) for b in form.bias)):
        mask, share = _recomputable(mask, world.extent(site.columns))
    return Masked(q, mask, empty, share)


def _uniform_rows(site: Site, form: Affine, heads: Heads, world: RealWorld, q: Tensor, mask: Tensor) -> Tensor:
    """Rows filled as a whole, with a finite value somewhere, get a query of zero.

    Where adding a score to the value changes nothing, that matters to the gradients only.
    """
    if not any(f.finite and (site.training or not f.absorbs) for f in form.fills):
        return q
    filled = _filled(site, form, heads, world)
    assert filled is not None
    constant = filled | (mask == -INFINITY)
    return torch.where(constant.all(-1, keepdim=True), torch.zeros((), dtype=q.dtype, device=q.device), q)


def _filled(site: Site, form: Affine, heads: Heads, world: RealWorld) -> Tensor | None:
    """Where scores are replaced."""
    if not form.fills:
        return None
    filled = evaluate(form.fills[0].condition, world)
    for fill in form.fills[1:]:
        filled = filled | evaluate(fill.condition, world)
    return grouped(site, heads, filled, world)


def _poisoned(q: Tensor, rows: Tensor) -> Tensor:
    return q + torch.where(rows, math.nan, 0.0).to(q.dtype)


def _recomputable(mask: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The mask with far rows shifted, and the share of each of the largest probabilities in rows that must stay."""
    top = mask.amax(-1, keepdim=True)
    swallows = top.abs() >= -ABSORBS
    far = (top.abs() > FAR) & ~swallows
    largest = (mask == top).expand(*mask.shape[:-1], columns).sum(-1, keepdim=True)
    return mask - torch.where(far, top, 0.0), torch.where(swallows, 1.0 / largest, 1.0)
