"""What the pass costs: its time beside the whole compilation, on BERT and GPT-2 of 2 to 48 layers (random weights).

python examples/compile_time.py                  # the graphs only, seconds: how the pass grows with the layers
python examples/compile_time.py --codegen        # with code generation, 12 layers, minutes: its share of a compile
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import sdpa_rewrite
from sdpa_rewrite import pipeline


def model_of(name: str, layers: int) -> torch.nn.Module:
    """A small-width BERT or GPT-2 with attention written out by hand."""
    import transformers

    sizes: dict[str, Any] = {"attn_implementation": "eager"}
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=64, num_attention_heads=4, num_hidden_layers=layers, intermediate_size=128, **sizes
        )
        return transformers.BertModel(config)
    config = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=layers, use_cache=False, **sizes)
    return transformers.GPT2Model(config)


class Clock:
    """Adds up the seconds spent in the pass."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.seconds = run, 0.0

    def __call__(self, graph: torch.fx.Graph) -> Any:
        """Run the pass."""
        start = time.perf_counter()
        try:
            return self.run(graph)
        finally:
            self.seconds += time.perf_counter() - start


def measure(name: str, layers: int, train: bool, codegen: bool) -> tuple[float, float]:
    """Seconds of the pass and of the whole compilation, first call included."""
    torch._dynamo.reset()
    model = model_of(name, layers).train(train)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = torch.randint(0, 1000, (2, 64))
    clock = Clock(pipeline.rewrite_graph)
    original, pipeline.rewrite_graph = pipeline.rewrite_graph, clock
    start = time.perf_counter()
    try:
        with torch.set_grad_enabled(train):
            if codegen:
                with torch._inductor.config.patch(fx_graph_cache=False):
                    out = torch.compile(model, backend="sdpa_rewrite")(ids)[0]
                    if train:
                        out.sum().backward()
            else:
                sdpa_rewrite.explain(model, ids)
    finally:
        pipeline.rewrite_graph = original
    return clock.seconds, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each model, mode and number of layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codegen", action="store_true")
    parser.add_argument("--layers", type=int, nargs="*")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args(arguments)
    layers = options.layers or ([12] if options.codegen else [2, 6, 12, 24, 48])
    print(f"{'model':6s} {'mode':9s} {'layers':>6s} {'pass s':>8s} {'compile s':>10s} {'share':>7s} {'ms/layer':>9s}")
    for name in ("bert", "gpt2"):
        for train in (False, True):
            for n in layers:
                runs = [measure(name, n, train, options.codegen) for _ in range(options.repeats)]
                own, whole = (statistics.median(column) for column in zip(*runs, strict=True))
                mode = "training" if train else "inference"
                share = own / whole
                each = own / n * 1000
                print(f"{name:6s} {mode:9s} {n:6d} {own:8.2f} {whole:10.2f} {share:7.1%} {each:9.1f}", flush=True)


if __name__ == "__main__":
    main()
