"""Which patterns are on.

A pattern is registered for the process, and may be disabled by name; a scope adds patterns for a block of one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from sdpa_rewrite import config
from sdpa_rewrite.authoring.pattern import Pattern

_registered: dict[str, Pattern] = {}
_scopes: ContextVar[tuple[Pattern, ...]] = ContextVar("sdpa_rewrite patterns", default=())


def register(pattern: Pattern) -> Pattern:
    """Switch a pattern on, for the whole process; one of the same name from the same place is replaced.

    Raises ``ValueError`` where another module has registered a pattern of that name.
    """
    known = _registered.get(pattern.name)
    if known is not None and known.function.__module__ != pattern.function.__module__:
        raise ValueError(f"{known.function.__module__} has registered a pattern {pattern.name!r} already")
    _registered[pattern.name] = pattern
    return pattern


def unregister(pattern: Pattern | str) -> None:
    """Switch a pattern off.  Raises ``KeyError`` for a name that is not registered."""
    name = pattern if isinstance(pattern, str) else pattern.name
    if name not in _registered:
        raise KeyError(f"no pattern {name!r} is registered; these are: {', '.join(sorted(_registered))}")
    del _registered[name]


def named(name: str) -> Pattern:
    """The pattern of this name that is on.  Raises ``KeyError``."""
    found = {p.name: p for p in active()}
    if name not in found:
        raise KeyError(f"no pattern {name!r} is on; these are: {', '.join(sorted(found))}")
    return found[name]


@contextlib.contextmanager
def scope(*patterns: Pattern) -> Iterator[None]:
    """Switch patterns on for what this thread compiles in the block."""
    token = _scopes.set((*_scopes.get(), *patterns))
    try:
        yield
    finally:
        _scopes.reset(token)


def active() -> tuple[Pattern, ...]:
    """The patterns that are on, in the order they are asked: by priority, then the last registered first."""
    found = {**_registered, **{p.name: p for p in _scopes.get()}}
    last_first = reversed([p for name, p in found.items() if name not in config.disabled_patterns])
    return tuple(sorted(last_first, key=lambda p: -p.priority))


def key() -> tuple[str, ...]:
    """What identifies the patterns that are on, and all they do."""
    return tuple(p.key() for p in active())
