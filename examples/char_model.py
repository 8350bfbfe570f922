"""A character model with nanoGPT-style attention and dropout, trained on the manual that ships inside Python."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sdpa_rewrite

try:
    from examples import _measure
except ImportError:  # run as a script
    import _measure  # type: ignore[no-redef]


class Attention(nn.Module):
    """Causal attention written out, with a mask cut from a buffer and dropout on the probabilities."""

    def __init__(self, width: int, heads: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.drop = nn.Dropout(dropout)
        self.register_buffer("past", torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, tokens, width)."""
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.past[:, :, :t, :t] == 0, float("-inf"))
        y = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class Model(nn.Module):
    """Two blocks of attention and a feed-forward network."""

    def __init__(self, symbols: int, width: int, heads: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(symbols, width), nn.Embedding(tokens, width)
        self.attention = nn.ModuleList(Attention(width, heads, tokens, dropout) for _ in range(2))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, symbols)

    def forward(self, ids: Tensor) -> Tensor:
        """Next-character loss of ids: (batch, tokens + 1)."""
        x, wanted = ids[:, :-1], ids[:, 1:]
        h = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for norm, attention, feed in zip(self.norms, self.attention, self.feed, strict=True):
            h = h + attention(norm(h))
            h = h + feed(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), wanted.flatten())


def train(step: Callable[[Tensor], Tensor], model: Model, data: Tensor, tokens: int, steps: int) -> list[float]:
    """Losses of ``steps`` steps from the model's present weights, on the same batches each time."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - tokens - 1, (4,), generator=generator)
        loss = step(torch.stack([data[s : s + tokens + 1] for s in starts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main(arguments: list[str] | None = None) -> None:
    """Train with and without the rewrite from the same weights; compare the losses, and with --repeats the steps.

    Without dropout the other is eager; with it stock torch.compile, which draws the same masks from the same seed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=0, help="steps whose time and memory are measured")
    options = parser.parse_args(arguments)
    text = "".join(topics.values())
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(c) for c in text[:200_000]])
    other = "inductor" if options.dropout or options.repeats else "eager"
    curves, steps = [], []
    for backend in (other, "sdpa_rewrite"):
        torch.manual_seed(0)
        model = Model(len(alphabet), options.width, 4, options.tokens, options.dropout)
        if backend == "sdpa_rewrite":
            print(sdpa_rewrite.explain(model, data[None, : options.tokens + 1]))
        torch.manual_seed(0)
        step = model if backend == "eager" else torch.compile(model, backend=backend)
        curves.append(train(step, model, data, options.tokens, options.steps))
        batch = torch.stack([data[k : k + options.tokens + 1] for k in range(4)])
        steps.append(lambda step=step, batch=batch: step(batch).backward())
    (first, ours), name = curves, "stock torch.compile" if other == "inductor" else "eager"
    print(f"loss {first[0]:.3f} -> {first[-1]:.3f} with {name}, {ours[0]:.3f} -> {ours[-1]:.3f} with sdpa_rewrite")
    print(f"largest difference of a loss: {max(abs(a - b) for a, b in zip(first, ours, strict=True)):.0e}")
    if options.repeats:
        _measure.report("a training step", *steps, options.repeats)


if __name__ == "__main__":
    main()
