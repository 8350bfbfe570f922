"""Attention as people write it, unchanged, compiled by sdpa_rewrite: what was recognised, and that it is right."""

from __future__ import annotations

import math

import torch

import sdpa_rewrite


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """q, k, v: (batch, heads, tokens, head size); padding: (batch, tokens), True where a token is real."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~padding[:, None, None, :], float("-inf"))
    return scores.softmax(dim=-1) @ v


def main() -> None:
    """Explain the function above, then compare its compiled gradients with eager's."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 200, 64, requires_grad=True) for _ in range(3))
    padding = torch.arange(200) < torch.tensor([[200], [150]])

    print(sdpa_rewrite.explain(attention, q, k, v, padding))

    compiled = torch.compile(attention, backend="sdpa_rewrite")
    ours = torch.autograd.grad(compiled(q, k, v, padding).square().sum(), (q, k, v))
    eager = torch.autograd.grad(attention(q, k, v, padding).square().sum(), (q, k, v))
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, eager, strict=True))
    print(f"largest relative difference of a gradient from eager: {worst:.0e}")


if __name__ == "__main__":
    main()
