"""What registered patterns cost: the pass's own time over a model with one, and what forty-nine more add to it.

python -m tests.pattern_cost                     # 12 layers, the shortest of 5 interleaved runs
python -m tests.pattern_cost --layers 24 --repeats 9

None of the patterns matches, so the graph stays as it is while they are asked.  They are the worst there are: each has
the model's own operators and differs from it, and from the others, in a number only.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from sdpa_rewrite import Pattern, pattern, patterns, pipeline
from sdpa_rewrite.authoring import stage
from sdpa_rewrite.authoring.lifted import lifted_variants
from tests.joint import with_graph

Q, K, V = Annotated[Tensor, "b h i d"], Annotated[Tensor, "b h j d"], Annotated[Tensor, "b h j e"]
GATE = Annotated[Tensor, "b h i e"]


def scaled(n: int) -> Pattern:
    """A number deep inside: of the scores."""

    @pattern(register=False, name=f"scaled_{n}")
    def form(q: Q, k: K, v: V, gate: GATE) -> Tensor:
        return ((q @ k.mT) * (n + 2.5)).softmax(-1) @ v * gate.sigmoid()

    return form


def gated(n: int) -> Pattern:
    """A number near the result: of the gate."""

    @pattern(register=False, name=f"gated_{n}")
    def form(q: Q, k: K, v: V, gate: GATE) -> Tensor:
        return ((q @ k.mT) * 0.25).softmax(-1) @ v * (gate * (n + 2.5)).sigmoid()

    return form


def plain(n: int) -> Pattern:
    """Attention alone, whose number is the last thing that a match comes to."""

    @pattern(register=False, name=f"plain_{n}")
    def form(q: Q, k: K, v: V) -> Tensor:
        return ((q @ k.mT) * (n + 2.5)).softmax(-1) @ v

    return form


KINDS: dict[str, Callable[[int], Pattern]] = {"scaled": scaled, "gated": gated, "plain": plain}


class Layer(nn.Module):
    """Attention whose output is gated, and two linear layers."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer."""
        each = self.inner(self.norms[0](x)).unflatten(-1, (4, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v, gate = each.unbind(0)
        out = ((q @ k.mT) * 0.25).softmax(-1) @ v * gate.sigmoid()
        x = x + self.outer(out.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


@dataclass(frozen=True)
class Cost:
    """CPU seconds: of the pass with one pattern beside the library's, and what the other patterns add to it."""

    one: float
    more: float


def cost(model: nn.Module, x: Tensor, forms: Sequence[Pattern], repeats: int) -> Cost:
    """What ``forms`` cost in the graph of ``model``."""

    def asked(graph: Graph, some: Sequence[Pattern]) -> float:
        with patterns.scope(*some):
            return timed(stage.apply, graph)

    def read(graph: Graph) -> Cost:
        runs = [[asked(graph, some) for some in (forms[:1], forms)] for _ in range(repeats)]
        one, all_of_them = (min(column) for column in zip(*runs, strict=True))
        with patterns.scope(forms[0]):
            return Cost(timed(pipeline.rewrite_graph, graph), all_of_them - one)

    for each in forms:
        list(lifted_variants(each))  # once in a process, whatever is compiled
    found: Cost = with_graph(read, model, x)
    return found


def timed(run: Callable[[Graph], Any], graph: Graph) -> float:
    """CPU seconds of a run, which others on the machine do not lengthen, nor the collector, which comes at any time."""
    gc.collect()
    gc.disable()
    start = time.thread_time()
    try:
        run(graph)
        return time.thread_time() - start
    finally:
        gc.enable()


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each kind of patterns and each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patterns", type=int, default=50)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'patterns':9s} {'mode':9s} {'one':>8s} {f'{options.patterns - 1} more':>9s} {'':>5s}")
    model, x = nn.Sequential(*(Layer() for _ in range(options.layers))), torch.randn(2, 32, 64)
    for train in (False, True):
        with torch.set_grad_enabled(train):
            cost(model, x, [scaled(0)], 1)  # warms up
            for kind, made in KINDS.items():
                found = cost(model, x, [made(n) for n in range(options.patterns)], options.repeats)
                share = found.more / found.one
                mode = "training" if train else "inference"
                print(f"{kind:9s} {mode:9s} {found.one:6.3f} s {found.more:7.3f} s {share:+5.0%}", flush=True)


if __name__ == "__main__":
    main()
