"""A pattern that the tests of the API share, and programs that are it in other spellings."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

import sdpa_rewrite
from sdpa_rewrite import Scalar


@sdpa_rewrite.pattern(register=False)
def gated(
    q: Annotated[Tensor, "b h i d"],
    k: Annotated[Tensor, "b h j d"],
    v: Annotated[Tensor, "b h j e"],
    gate: Annotated[Tensor, "b h i e"],
    scale: Scalar,
) -> Tensor:
    """Attention whose output is gated."""
    return ((q @ k.mT) * scale).softmax(-1) @ v * gate.sigmoid()


@gated.replace
def fused(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: Scalar) -> Tensor:
    if not isinstance(scale, float):
        q, scale = q * scale, 1.0
    return F.scaled_dot_product_attention(q, k, v, scale=scale) * gate.sigmoid()


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])).softmax(-1) @ v * torch.sigmoid(g)


def scaled_query(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return g.sigmoid() * (torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1) @ v)


def split_scale(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    c = q.shape[-1] ** -0.25
    return (((q * c) @ (k * c).mT).softmax(-1) @ v) * g.sigmoid()


def einsum(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    p = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.3).softmax(-1)
    return torch.einsum("bhij,bhje->bhie", p, v) * g.sigmoid()


def flattened(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    q, k, v, gate = (x.flatten(0, 1) for x in (q, k, v, g))
    return (torch.bmm(torch.softmax(torch.bmm(q, k.mT) * 0.3, -1), v) * gate.sigmoid()).view_as(g)


def by_hand(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    e = (0.3 * (q @ k.mT)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v * g.sigmoid()


def through_log(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return F.log_softmax(0.3 * (q @ k.mT), -1).exp() @ v * g.sigmoid()


def unscaled(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v * g.sigmoid()


def heads_last(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    q, k, v, gate = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, g))
    out = ((q @ k.mT) * 0.3).softmax(-1) @ v
    return (out.transpose(1, 2) * gate.transpose(1, 2).sigmoid()).flatten(2)


def tensor_scale(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return ((q @ k.mT) * g.mean()).softmax(-1) @ v * g.sigmoid()


SPELLINGS = [
    *(plain, scaled_query, split_scale, einsum, flattened, by_hand, through_log, unscaled, heads_last, tensor_scale)
]


def tensors(batch: int = 2, grad: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and gate; five keys for seven queries."""
    shapes = [(batch, 3, 7, 4), (batch, 3, 5, 4), (batch, 3, 5, 4), (batch, 3, 7, 4)]
    return [torch.randn(s, dtype=dtype, requires_grad=grad) for s in shapes]
