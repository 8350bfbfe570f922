"""Inductor's and AOTAutograd's caches: warm in the next process, never stale."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import RunPython

# Products only: no code is generated.
SCRIPT = """
    import torch
    from torch._dynamo.utils import counters

    def products(x, y):
        return (x @ y) @ y.mT

    x, y = torch.randn(4, 5, requires_grad=True), torch.randn(5, 6)
    torch.compile(products, backend="sdpa_rewrite")(x, y).sum().backward()
    hits = counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_bypass"]
    fx = counters["inductor"]["fxgraph_cache_hit"] > 0, counters["inductor"]["fxgraph_cache_bypass"]
    print(*hits, *fx, counters["sdpa_rewrite"]["graphs"])
"""

MISS, HIT = "0 0 False 0 1", "1 0 True 0 0"


@pytest.fixture
def compile_with(run_python: RunPython) -> Callable[..., str]:
    def run(**environment: str) -> str:
        done = run_python(SCRIPT, TORCHINDUCTOR_FX_GRAPH_CACHE="1", TORCHINDUCTOR_AUTOGRAD_CACHE="1", **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_warm_in_the_next_process_and_never_stale(compile_with: Callable[..., str]) -> None:
    assert compile_with() == MISS
    assert compile_with(SDPA_REWRITE_LOG="info") == HIT  # changes nothing that is compiled
    assert compile_with(SDPA_REWRITE_DROPOUT="any") == MISS
    assert compile_with() == HIT
