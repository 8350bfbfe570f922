"""``explain``: compile once, for the report only."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sdpa_rewrite import compat
from sdpa_rewrite.report import Report, collect

_serial = itertools.count()


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Tell what becomes of each attention in ``fn(*args, **kwargs)``, with its source line and why.

    ``fn`` is a module or a function, compiled or not.  It is compiled afresh, by everything but code generation
    (the graphs run in eager), and runs once: forward, and backward if its outputs require grad.  Gradients,
    buffers and random state are as before afterwards, and what you compiled stays compiled.
    """
    target = _uncompiled(fn)
    from sdpa_rewrite.authoring import stage

    token = stage.thorough.set(True)
    try:
        return _explained(target, args, kwargs)
    finally:
        stage.thorough.reset(token)


def _explained(target: Callable[..., Any], args: Any, kwargs: Any) -> Report:
    with collect() as collected, _undisturbed(target), _fresh_compilation():
        compiled = torch.compile(_probe(target), backend=_backend(), **compat.isolated_compile_options())
        _run_backward(compiled(*args, **kwargs))
    return Report(tuple(collected.sites), tuple(collected.failures), collected.graphs)


def _uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What the user gave to torch.compile, if ``fn`` came out of it."""
    original = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
    return fn if original is None else original


def _probe(target: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``target``, with a code object of its own.

    Dynamo keeps what it compiled, and which sizes it has seen change, by code object and its name: so nothing
    is found there from before, and nothing of ours is left on the user's code (but for the functions around a
    graph break, which Dynamo compiles by themselves).
    """

    def probe(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    code = probe.__code__.replace(co_name=f"probe_{next(_serial)}")
    return FunctionType(code, probe.__globals__, code.co_name, probe.__defaults__, probe.__closure__)


def _backend() -> Callable[..., Any]:
    """A backend of its own for each call, since Dynamo keeps what it compiled by backend too."""
    from sdpa_rewrite.backend import compile_with

    def explaining(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return compile_with(gm, example_inputs, {}, {}, run_in_eager)

    explaining.__name__ = "sdpa_rewrite"  # what is allowed while Dynamo traces for the backend is allowed here
    return explaining


def run_in_eager(gm: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
    """Takes the place of code generation: the graph as it is, operator by operator."""
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(gm.forward)


@contextlib.contextmanager
def _fresh_compilation() -> Iterator[None]:
    """No cache serves a graph, so that our pass sees all of them, and no limit on recompilations is hit."""
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    with (
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
        dynamo_config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16),
    ):
        yield


@contextlib.contextmanager
def _undisturbed(target: Callable[..., Any]) -> Iterator[None]:
    """Random state and the buffers of a module are put back."""
    buffers = list(target.buffers()) if isinstance(target, torch.nn.Module) else []
    before = [buffer.detach().clone() for buffer in buffers]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


def _run_backward(outputs: Any) -> None:
    """Compute all gradients, and leave every ``.grad`` alone."""
    tensors = [each for each in pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad]
    leaves = list(_leaves(tensors))
    if leaves:
        torch.autograd.grad(tensors, leaves, list(map(torch.ones_like, tensors)), allow_unused=True)


def _leaves(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that ``backward`` would accumulate gradients into."""
    yield from (each for each in tensors if each.is_leaf)
    todo = [each.grad_fn for each in tensors if each.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        todo.extend(following)
