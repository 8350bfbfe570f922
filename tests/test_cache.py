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


@pytest.mark.codegen
def test_a_kernel_of_ours_is_found_in_the_cache(run_python: RunPython) -> None:
    """A warm process runs no pass; the cached graph's operators must be there all the same."""
    script = """
        import torch
        from torch._dynamo.utils import counters

        def attention(q, k, v):
            return torch.nn.functional.dropout((q @ k.mT).softmax(-1), 0.1) @ v

        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
        out = torch.compile(attention, backend="sdpa_rewrite")(q, k, v)
        out.sum().backward()
        print(counters["aot_autograd"]["autograd_cache_hit"], float(out.sum()), float(q.grad.sum()))
    """
    switches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    cold, warm = (run_python(script, **switches) for _ in range(2))
    assert cold.returncode == warm.returncode == 0, cold.stderr + warm.stderr
    assert (cold.stdout[0], warm.stdout[0]) == ("0", "1")
    assert cold.stdout[1:] == warm.stdout[1:]
