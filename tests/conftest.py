"""What the tests share: a clean process state around each, and ways to compile without generating code."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx as inductor

import sdpa_rewrite
from sdpa_rewrite import config, pipeline
from sdpa_rewrite.outcome import Outcome

RunPython = Callable[..., subprocess.CompletedProcess[str]]
# torch says so on stderr at import where NumPy is not installed; given last, a filter goes before `-W error`
WITHOUT_NUMPY = ("-W", "ignore:Failed to initialize NumPy:UserWarning")


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Nothing compiled, nothing counted, the switch off and no cache, before and after each test."""
    options = torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False)
    with options, torch._functorch.config.patch(enable_autograd_cache=False):
        _reset()
        yield
        _reset()


def _reset() -> None:
    torch._dynamo.reset()
    counters.clear()
    sdpa_rewrite.disable()
    torch.manual_seed(0)


@pytest.fixture
def no_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor runs its final graphs in eager: all of its passes, none of its code generation."""

    def run_in_eager(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
        return make_boxed_func(gm.forward)

    default = inductor.compile_fx.__defaults__ or ()
    replaced = tuple(run_in_eager if value is inductor.compile_fx_inner else value for value in default)
    monkeypatch.setattr(inductor.compile_fx, "__defaults__", replaced)
    monkeypatch.setattr(inductor, "compile_fx_inner", run_in_eager)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """The graphs that reach the pipeline, which does nothing but note them."""
    graphs: list[torch.fx.Graph] = []

    def note(graph: torch.fx.Graph) -> tuple[Outcome, ...]:
        graphs.append(graph)
        return ()

    monkeypatch.setattr(pipeline, "rewrite_graph", note)
    return graphs


@pytest.fixture
def strict() -> Iterator[None]:
    """Exceptions of the pass are raised."""
    with config.patch(strict=True):
        yield


@pytest.fixture
def counted() -> Callable[[], Counter[str]]:
    """Our counters, as they are when called."""
    return lambda: counters["sdpa_rewrite"]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run a script in a process of its own, away from the checkout, as a user would."""

    def run(script: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SDPA_REWRITE", "TORCH"))}
        clean |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), **environment}
        command = [sys.executable, *flags, *WITHOUT_NUMPY, str(path)]
        return subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The plainest attention there is."""
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


def inputs(*shape: int, requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, k and v."""
    q, k, v = (torch.randn(shape or (2, 3, 8, 4), requires_grad=requires_grad) for _ in range(3))
    return q, k, v
