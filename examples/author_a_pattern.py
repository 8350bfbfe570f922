"""Teach the plugin an attention of your own: gated attention, as a pattern and what takes its place."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

import sdpa_rewrite
from sdpa_rewrite import Scalar


@sdpa_rewrite.pattern(register=False)
def gated_attention(
    q: Annotated[Tensor, "b h i d"],
    k: Annotated[Tensor, "b h j d"],
    v: Annotated[Tensor, "b h j d"],
    gate: Annotated[Tensor, "b h i d"],
    scale: Scalar,
) -> Tensor:
    """Attention whose output is gated."""
    return ((q @ k.mT) * scale).softmax(-1) @ v * gate.sigmoid()


@gated_attention.replace
def fused(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: Scalar) -> Tensor:
    """Fused attention, then the gate.  A scale that is a tensor goes to the query."""
    if not isinstance(scale, (int, float)):
        q, scale = q * scale, 1.0
    return F.scaled_dot_product_attention(q, k, v, scale=scale) * gate.sigmoid()


def model(x: Tensor, w: Tensor) -> Tensor:
    """What a user wrote: other layout, other order, the scale on the query."""
    q, k, v, g = ((x @ each).unflatten(-1, (4, -1)).transpose(1, 2) for each in w.unbind(0))
    weights = torch.softmax((q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1), dim=-1)
    out: Tensor = torch.sigmoid(g) * (weights @ v)
    return out.transpose(1, 2).flatten(2)


def main() -> None:
    """Explain, compile, train, and check the pattern."""
    x, w = torch.randn(2, 16, 32, requires_grad=True), torch.randn(4, 32, 32) * 0.2
    with sdpa_rewrite.patterns.scope(gated_attention):
        print(sdpa_rewrite.patterns.describe(gated_attention))
        print(sdpa_rewrite.explain(model, x, w))
        compiled = torch.compile(model, backend="sdpa_rewrite")
        compiled(x, w).sum().backward()
        print(f"largest difference from eager: {(compiled(x, w) - model(x, w)).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
