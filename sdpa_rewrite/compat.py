"""The one place that knows versions of torch and reaches into its internals for the doors.

Importing it imports nothing of torch that ``import torch`` has not imported.
"""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import importlib.util
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

OLDEST = (2, 11)
NEWEST = (2, 15)


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise an ImportError that names the supported versions if torch is not one of them."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        supported = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        raise ImportError(f"sdpa_rewrite supports torch {supported}; this is torch {version}")


# -- torch.utils._config_module ------------------------------------------------------------------------------


def make_context_local(config: ModuleType) -> None:
    """Give each thread its own values of ``config``, as every config of torch has from 2.12 on.

    In 2.11 a value that is set holds for the process, and two overlapping patches restore each other's values.
    """
    entries: dict[str, Any] = config._config
    for name, entry in entries.items():
        if not isinstance(entry, _ContextLocal) and not isinstance(entry.user_override, ContextVar):
            _localize(entry, ContextVar(name, default=entry.user_override))


class _ContextLocal:
    """What is done for an option is not done again."""


def _localize(entry: Any, value: ContextVar[Any]) -> None:
    # a data descriptor of the class goes before the instance's attribute
    class Local(_ContextLocal, type(entry)):  # type: ignore[misc]
        @property
        def user_override(self) -> Any:
            return value.get()

        @user_override.setter
        def user_override(self, new: Any) -> None:
            value.set(new)

    entry.__class__ = Local


def derive_option(config: ModuleType, name: str, derive: Callable[[Any], Any]) -> None:
    """Make reading ``config.name`` give ``derive(value)``; what is set, patched and restored stays the plain value.

    So a chain that ``derive`` builds is never lost when somebody else sets the option, never left behind when
    we are through, and follows the thread that reads.  Each config module is the only instance of its class.
    """
    cls = type(config)
    if name in vars(cls):
        return
    plain = cls.__getattr__
    setattr(cls, name, property(lambda self: derive(plain(self, name))))


# -- imports that have not happened yet ----------------------------------------------------------------------


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then(module)`` as soon as module ``name`` is there: now, or right after its import."""
    if name in sys.modules:
        then(importlib.import_module(name))  # waits where another thread is in the middle of the import
    else:
        sys.meta_path.insert(0, _ImportWatch(name, then))


class _ImportWatch(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders would, and calls back after it was executed."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then
        self._searching = threading.local()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self._name or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.now = False
        if spec is not None and spec.loader is not None:
            self._watch(spec)
        return spec

    def _watch(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._then(module)

        loader.exec_module = exec_module


# -- torch's own attention patterns --------------------------------------------------------------------------

_ours: weakref.WeakSet[torch.fx.Graph] = weakref.WeakSet()
_lock = threading.Lock()


def keep_torch_patterns_from(graph: torch.fx.Graph) -> None:
    """Keep torch's own attention patterns from ``graph``, and from no other.

    Torch holds them in process-wide lists and applies these right after our pass.  Each list gets an ``apply``
    of ours, which leaves those entries out for graphs that were named here.  It stays there: taking it away
    could hit a compilation in another thread between its pass and its patterns.
    """
    from torch._inductor.fx_passes import joint_graph

    with _lock:
        _ours.add(graph)
        for patterns in {id(p): p for p in (joint_graph.early_patterns, *joint_graph.pass_patterns)}.values():
            # Looked at each time: others put an `apply` there too, perhaps over ours.
            if not isinstance(vars(patterns).get("apply"), _GuardedApply):
                patterns.apply = _GuardedApply(patterns)  # type: ignore[method-assign]


def is_ours(graph: torch.fx.Graph) -> bool:
    """Whether torch's own attention patterns are kept from ``graph``."""
    with _lock:
        return graph in _ours


class _GuardedApply:
    def __init__(self, patterns: Any) -> None:
        self._patterns = patterns
        self._before = vars(patterns).get("apply")

    def __call__(self, gm: torch.fx.GraphModule | torch.fx.Graph) -> int:
        graph = gm.graph if isinstance(gm, torch.fx.GraphModule) else gm
        apply = type(self._patterns).apply
        if is_ours(graph):
            return int(apply(_without_attention(self._patterns), gm))
        return int(self._before(gm) if self._before is not None else apply(self._patterns, gm))


def _without_attention(patterns: Any) -> Any:
    """A copy of a ``PatternMatcherPass`` that lacks the attention patterns."""
    kept = {key: [e for e in entries if not is_attention_pattern(e)] for key, entries in patterns.patterns.items()}
    others = copy.copy(patterns)
    vars(others).pop("apply", None)
    others.patterns = type(patterns.patterns)(list, {key: entries for key, entries in kept.items() if entries})
    return others


def is_attention_pattern(entry: Any) -> bool:
    """Whether a ``PatternEntry`` is one of torch's own attention patterns (``_sfdp_...``)."""
    name = getattr(entry, "pattern_name", None) or getattr(_searched_function(entry), "__name__", "")
    return str(name).startswith("_sfdp_")


def _searched_function(entry: Any) -> Any:
    # torch 2.11 does not name its entries: the pattern's function is a variable of the check's closure
    check = getattr(entry, "extra_check", None)
    if not inspect.isfunction(check):
        return None
    cells = dict(zip(check.__code__.co_freevars, check.__closure__ or (), strict=True))
    return cells["search_fn"].cell_contents if "search_fn" in cells else None


# -- torch.compile -------------------------------------------------------------------------------------------


def isolated_compile_options() -> dict[str, Any]:
    """Arguments for ``torch.compile`` that keep what it compiles apart from the user's compiled code (from 2.12 on)."""
    parameters = inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if "isolate_recompiles" in parameters else {}


def compiling_backend() -> str:
    """The name of the backend that Dynamo traces for, in this thread; empty where it does not, or has no name."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend = InstructionTranslator.current_tx().output.compiler_fn
    except (AttributeError, IndexError):
        return ""
    return str(getattr(getattr(backend, "_torchdynamo_orig_backend", backend), "compiler_name", ""))


# -- FlexAttention -------------------------------------------------------------------------------------------


def allow_backward(flex_attention: ModuleType, allowed: Callable[[str], bool]) -> None:
    """Keep torch from refusing operands that need a gradient on a device where that is ``allowed``.

    Dynamo asks when it traces the call; the answer holds for what it compiles then.
    """
    refuse = flex_attention._validate_device
    allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch._dynamo.assume_constant_result

    def validate_device(query: Any, key: Any, value: Any) -> None:
        if not allowed(query.device.type):
            refuse(query, key, value)

    flex_attention._validate_device = validate_device  # type: ignore[attr-defined]
