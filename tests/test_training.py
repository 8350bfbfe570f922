"""Training with the rewrite follows the same path as without; recomputation and provenance carry over."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sdpa_rewrite import report
from tests.harness import compiled, same_as_eager, statuses

WIDTH, HEADS, LENGTH, WORDS = 32, 4, 16, 29


class Block(nn.Module):
    """A block of a small GPT with attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def attention(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, -math.inf)  # type: ignore[index]
        y = F.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.one(x))
        return x + self.mlp(self.two(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two blocks over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.position(torch.arange(words.shape[1]))
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


def losses(model: nn.Module, run: Callable[..., Any], steps: int = 20) -> list[float]:
    """Train on random words."""
    g = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        words = torch.randint(WORDS, (4, LENGTH + 1), generator=g)
        loss = F.cross_entropy(run(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_twenty_steps_follow_the_same_losses() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model())
    ours, theirs = models
    with report.collect() as told:
        mine = losses(ours, compiled(ours))
    assert statuses(told) == ["fused", "fused"]
    assert all(o.training for o in told.sites)
    expected = losses(theirs, theirs)
    assert expected[-1] < expected[0]
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1)) * 0.3 + m).softmax(-1) @ v


def kernels(gm: torch.fx.GraphModule) -> list[str]:
    """The fused operators of a graph; a recomputed one is the argument of an operator that keeps random state."""
    called = [t for n in gm.graph.nodes for t in (n.target, *n.args) if isinstance(t, torch._ops.OpOverload)]
    names = [t._schema.name.split("::")[1] for t in called]
    return [n.removeprefix("_scaled_dot_product_") for n in names if "attention" in n]


KERNELS = {
    "sdpa": ("flash_attention_for_cpu", "flash_attention_for_cpu_backward"),
    "fused": ("attention", "attention_backward"),
}


@pytest.mark.parametrize("emitter", KERNELS)
def test_a_checkpointed_attention_stays_recomputed(emitter: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return checkpoint(attention, q * 2.0, k, v, m, use_reentrant=False) + q  # type: ignore[no-any-return]

    graphs: list[torch.fx.GraphModule] = []
    args = [torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3)]
    told = same_as_eager(function, *args, torch.randn(6, 6), keep=graphs, emitters=(emitter,))
    assert statuses(told) == ["fused"]
    forward, backward = graphs
    assert kernels(forward) == [KERNELS[emitter][0]]
    assert kernels(backward) == list(KERNELS[emitter])


@pytest.mark.parametrize("emitter", KERNELS)
def test_an_attention_that_is_not_checkpointed_is_saved(emitter: str) -> None:
    graphs: list[torch.fx.GraphModule] = []
    args = [torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3)]
    same_as_eager(attention, *args, torch.randn(6, 6), keep=graphs, emitters=(emitter,))
    assert [kernels(g) for g in graphs] == [[k] for k in KERNELS[emitter]]


def test_the_new_nodes_say_where_they_come_from() -> None:
    class Module(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
            return attention(q, k, v, m)

    graphs: list[torch.fx.GraphModule] = []
    args = [torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3)]
    same_as_eager(Module(), *args, torch.randn(6, 6), keep=graphs)
    for gm, tag in zip(graphs, ("is_forward", "is_backward"), strict=True):
        [kernel] = [n for n in gm.graph.nodes if "attention" in str(n.target)]
        assert "test_training.py" in kernel.meta["stack_trace"]
        assert kernel.meta.get("partitioner_tag") == tag


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", ["flat", "window", "transposed output", "one head"])
def test_symbolic_sizes(layout: str, grad: bool) -> None:
    """One compilation serves other sizes."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (x @ each for each in w.unbind(0))
        if layout == "one head":
            return (q @ k.mT * c**-0.5).softmax(-1) @ v
        if layout == "transposed output":
            p = ((q @ k.mT) * c**-0.5).softmax(-1)
            return torch.bmm(v.mT, p.mT).reshape(b, c, t)
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in (q, k, v))
        if layout == "window":
            q, k, v = (y.unflatten(2, (2, t // 2)).transpose(1, 2) for y in (q, k, v))
        out = ((q @ k.mT) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        out = out.transpose(1, 2).flatten(2, 3) if layout == "window" else out
        return out.transpose(1, 2).reshape(b, t, c)

    w = torch.randn(3, 16, 16) * 0.2
    f = compiled(function, dynamic=True)
    with report.collect() as told:
        for b, t in ((2, 6), (3, 8), (5, 10)):
            x = torch.randn(b, t, 16, requires_grad=grad)
            torch.testing.assert_close(f(x, w), function(x, w), rtol=1e-4, atol=1e-5)
            if grad:
                [mine] = torch.autograd.grad(f(x, w).square().sum(), x)
                [true] = torch.autograd.grad(function(x, w).square().sum(), x)
                torch.testing.assert_close(mine, true, rtol=1e-3, atol=1e-4)
    assert statuses(told) == ["fused"]
