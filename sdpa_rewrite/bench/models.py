"""Blocks of BERT and GPT-2 in plain torch, their attention written out or called."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, scaled_dot_product_attention

from sdpa_rewrite.bench.forms import INFINITY, scores


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual; ``call`` takes torch's operator for attention."""

    def __init__(self, width: int, heads: int, rate: float, call: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.rate, self.call = heads, rate, call

    def split(self, x: Tensor) -> list[Tensor]:
        """Query, key and value by heads."""
        return [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)]

    def merge(self, x: Tensor) -> Tensor:
        """The heads of the output, one after another, through the last projection."""
        merged: Tensor = self.out(x.transpose(1, 2).flatten(2))
        return merged

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward network."""
        fed: Tensor = self.down(gelu(self.up(x)))
        return fed


class Bert(Block):
    """Normalised after each part; keys that are padding are hidden by a large negative number, as BERT has it."""

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """x: (batch, tokens, width); keys: (batch, tokens), true where there is a token."""
        q, k, v = self.split(x)
        hidden = torch.where(keys, 0.0, torch.finfo(x.dtype).min).to(x.dtype)[:, None, None, :]
        rate = self.rate if self.training else 0.0
        if self.call:
            attended = scaled_dot_product_attention(q, k, v, attn_mask=hidden, dropout_p=rate)
        else:
            attended = dropout((scores(q, k) + hidden).softmax(-1), rate, self.training) @ v
        x = self.first(x + self.merge(attended))
        out: Tensor = self.second(x + self.feed(x))
        return out


class Gpt(Block):
    """Normalised before each part, causal."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, tokens, width)."""
        q, k, v = self.split(self.first(x))
        rate = self.rate if self.training else 0.0
        if self.call:
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        else:
            past = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
            weights = scores(q, k).masked_fill(~past, -INFINITY).softmax(-1)
            attended = dropout(weights, rate, self.training) @ v
        x = x + self.merge(attended)
        return x + self.feed(self.second(x))


def pair(kind: type[Block], width: int, heads: int, rate: float, dtype: torch.dtype) -> tuple[Block, Block]:
    """The block with its attention written out, and one with the same weights that calls torch's operator."""
    written, called = (kind(width, heads, rate, call).to(dtype) for call in (False, True))
    called.load_state_dict(written.state_dict())
    return written, called
