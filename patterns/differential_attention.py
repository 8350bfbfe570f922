"""Differential attention: the difference of two attentions over the same values.

Found in: "Differential Transformer" (Ye et al.; microsoft/unilm, ``multihead_diffattn.py``).  The product with the
values is taken apart, ``(P - l R) V = P V - l R V``, and each half is an attention that kernels take.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sdpa_rewrite.authoring import Match, NoMatch, Scalar, pattern
from sdpa_rewrite.patterns.operands import Key, Query, Value


@pattern
def differential_attention(q: Query, k: Key, r: Query, s: Key, v: Value, weight: Scalar, scale: Scalar) -> Tensor:
    """The second attention, weighted, is taken from the first; one product with the values."""
    first, second = ((q @ k.mT) * scale).softmax(-1), ((r @ s.mT) * scale).softmax(-1)
    return (first - weight * second) @ v


@differential_attention.replace
def two_attentions(q: Tensor, k: Tensor, r: Tensor, s: Tensor, v: Tensor, weight: Scalar, scale: Scalar) -> Tensor:
    """Two attentions, each fused in turn."""
    return _attention(q, k, v, scale) - weight * _attention(r, s, v, scale)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: Scalar) -> Tensor:
    if isinstance(scale, float) and q.shape[-1] == v.shape[-1]:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    return ((q @ k.mT) * scale).softmax(-1) @ v


@differential_attention.check
def short_enough(m: Match) -> None:
    """Two products with the values instead of one: worth it unless the values are much wider than the keys."""
    wide, narrow = m.sizes["e"], m.sizes["d"]
    if isinstance(wide, int) and isinstance(narrow, int) and wide > 8 * narrow:
        raise NoMatch(f"values of {wide} for keys of {narrow}: a second product with the values costs more", at=m["v"])


@differential_attention.near_miss("the softmax is of the difference")
def _inside(q: Tensor, k: Tensor, r: Tensor, s: Tensor, v: Tensor, weight: float, scale: float) -> Tensor:
    return ((q @ k.mT) * scale - weight * (r @ s.mT) * scale).softmax(-1) @ v


@differential_attention.near_miss("two scales")
def _scales(q: Tensor, k: Tensor, r: Tensor, s: Tensor, v: Tensor, weight: float, scale: float) -> Tensor:
    first, second = ((q @ k.mT) * scale).softmax(-1), ((r @ s.mT) * (2 * scale)).softmax(-1)
    return (first - weight * second) @ v
