"""Biases whose gradient leaves the scores in an unusual way, as real models have them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.harness import same_as_eager
from tests.test_emit_flex import INFINITY, fused_by
from tests.test_emit_fused import OURS, learned


def shifted_in_blocks(q: Tensor, k: Tensor, v: Tensor, relative: Tensor, hidden: Tensor) -> Tensor:
    """Gemma 4's audio encoder: the relative shift of a block of queries over a context of more keys."""
    batch, heads, blocks, chunk, _ = q.shape
    context, length = k.shape[-2], relative.shape[-1]
    far = torch.nn.functional.pad(q @ relative[:, None], (0, context + 1 - length))
    far = far.view(batch, heads, blocks, chunk * (context + 1))[..., : chunk * context]
    scores = torch.tanh((q @ k.mT + far.view(batch, heads, blocks, chunk, context)) / 5) * 5
    return scores.masked_fill(hidden, -1e9).softmax(-1) @ v


def test_the_relative_shift_of_blocks() -> None:
    """The gradient of the shifted scores is put into a larger tensor, which is no score any more."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 6, 8), torch.randn(2, 4, 3, 11, 8), torch.randn(2, 4, 3, 11, 8)
    relative, hidden = torch.randn(4, 8, 7), torch.rand(2, 1, 3, 6, 11) > 0.8
    found = same_as_eager(shifted_in_blocks, *learned(q, k, v, relative, hidden), emitters=OURS)
    assert fused_by(found) == ["fused"]


def gathered_beside_a_sink(q: Tensor, k: Tensor, v: Tensor, relative: Tensor, sinks: Tensor) -> Tensor:
    """Inkling: a bias by distance, zero far away, and a sink for each query."""
    n, extent = q.shape[-2], relative.shape[-1]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    bias = relative.gather(-1, distance.clamp(0, extent - 1).expand(*relative.shape[:2], -1, -1))
    bias = bias.masked_fill((distance < 0) | (distance >= extent), 0.0)
    scores = (q @ k.mT * 0.3 + bias).masked_fill(distance < 0, -INFINITY)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v


def test_a_gradient_with_the_strides_of_the_concatenation() -> None:
    """It is a part of a larger tensor, and what reads it computes the same from any strides."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 17, 8) for _ in range(3))
    relative, sinks = torch.randn(2, 4, 17, 9), torch.randn(2, 4, 17, 1)
    found = same_as_eager(gathered_beside_a_sink, *learned(q, k, v, relative, sinks), emitters=OURS)
    assert fused_by(found) == ["fused"]
