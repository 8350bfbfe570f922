"""The pass that Inductor runs on each joint and each inference graph.

Importing this imports Inductor; ``hook`` does so only when a compilation asks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from sdpa_rewrite import compat, config, report

SOURCE_SUFFIXES = (".py", ".json", ".h", ".cpp")


def registered_patterns_key() -> tuple[str, ...]:
    """What identifies the patterns that users registered: part of the key of Inductor's caches."""
    from sdpa_rewrite.authoring import registry

    return registry.key()


Watcher = Callable[[torch.fx.Graph], Any]
_watchers: ContextVar[tuple[tuple[Watcher, Watcher], ...]] = ContextVar("sdpa_rewrite watchers", default=())


@contextlib.contextmanager
def watched(before: Watcher, after: Watcher) -> Iterator[None]:
    """Show ``before`` and ``after`` every graph that the pass rewrites in the block."""
    token = _watchers.set((*_watchers.get(), (before, after)))
    try:
        yield
    finally:
        _watchers.reset(token)


class AttentionPass(CustomGraphPass):
    """Rewrites the attention in a graph, in place.

    Whatever fails in it leaves the graph as it was, is logged and counted, and goes no further (unless
    ``config.strict``).  ``active`` is asked each time; a pass that is not active does nothing and has the
    key of a pass that does nothing.
    """

    def __init__(self, active: Callable[[], bool] = lambda: True) -> None:
        self._active = active

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrite ``graph``."""
        if not self._active():
            return
        try:
            self._rewrite(graph)
        except Exception as error:
            report.record_failure(error)
            if config.strict:
                raise

    def _rewrite(self, graph: torch.fx.Graph) -> None:
        if problems := config.problems():
            raise ValueError("; ".join(problems))
        if not config.keep_torch_patterns:
            compat.keep_torch_patterns_from(graph)
        # Here and not above, so that an engine that cannot even be imported does not stop the compilation.
        from sdpa_rewrite import pipeline

        watchers = _watchers.get()
        for before, _ in watchers:
            before(graph)
        report.record(pipeline.rewrite_graph(graph))
        for _, after in watchers:
            after(graph)

    def uuid(self) -> str | None:
        """Everything that changes what the pass makes of a graph; None, which means no caching, if unknown."""
        if not self._active():
            return "sdpa_rewrite: off"
        options = sorted(config.save_config_portable().items())
        try:
            # a cache may answer with a graph that calls our operators, and then no pass runs that would define them
            from sdpa_rewrite import costs
            from sdpa_rewrite.kernels import op  # noqa: F401

            parts = (_sources_digest(), torch.__version__, options, costs.key(), registered_patterns_key())
        except Exception:  # sources that cannot be read or imported, a file of costs that is none
            return None
        return hashlib.sha256(repr(parts).encode()).hexdigest()


class PassChain(CustomGraphPass):
    """Several passes as one, in order.  (torch 2.11 and 2.12 take a single pass only, later ones a list too.)"""

    def __init__(self, passes: tuple[Callable[[torch.fx.Graph], None], ...]) -> None:
        self.passes = passes

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Run each pass on ``graph``."""
        for each in self.passes:
            each(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The keys of all passes; None, which means no caching, if one has none."""
        keys = tuple(each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes)
        return keys if all(keys) else None


def passes_of(option: Any) -> tuple[Callable[[torch.fx.Graph], None], ...]:
    """The passes that a value of ``joint_custom_pre_pass`` stands for: none, one, a list, a tuple or a chain."""
    if option is None:
        return ()
    if isinstance(option, PassChain):
        return option.passes
    if isinstance(option, (list, tuple)):
        return tuple(each for item in option for each in passes_of(item))
    return (option,)


@functools.cache
def _sources_digest() -> str:
    """A hash over the contents of the package's files, patterns and templates included."""
    digest = hashlib.sha256()
    for path in sorted(_source_files(Path(__file__).parent)):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _source_files(root: Path) -> Iterator[Path]:
    for folder, _, files in os.walk(root, followlinks=True):  # patterns/ is a symlink in a checkout
        yield from (Path(folder, name) for name in files if name.endswith(SOURCE_SUFFIXES))


attention_pass = AttentionPass()
"""The pass, for ``torch.compile(model, options={"joint_custom_pre_pass": sdpa_rewrite.attention_pass})``."""
