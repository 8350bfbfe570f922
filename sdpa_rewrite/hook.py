"""The switch: which compilations of the stock backend run our pass, without replacing anybody else's.

Nothing is written into Inductor's options.  Instead, reading ``joint_custom_pre_pass`` while the switch is on
gives the pass that was set there, if any, with ours after it: whoever sets, patches or restores the option
neither loses our pass nor leaves it behind, and each thread reads by its own switch.
"""

from __future__ import annotations

import contextlib
import os
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from sdpa_rewrite import compat, config

_process_wide = os.environ.get("SDPA_REWRITE", "").strip().lower() in ("1", "true", "yes", "on")
_scopes: ContextVar[tuple[Any, ...]] = ContextVar("sdpa_rewrite scopes", default=())


def enable() -> None:
    """Rewrite attention in all that the stock backend compiles from now on, in every thread of the process."""
    _switch(True)


def disable() -> None:
    """Stop rewriting in all that the stock backend compiles from now on; scopes of other threads stay as they are.

    What is compiled already stays compiled, here and in ``enable``: see ``torch.compiler.reset``.
    """
    _switch(False)


def is_enabled() -> bool:
    """Whether the stock backend rewrites attention, if it compiles in this thread, now."""
    here: bool | None = config.enabled
    return _process_wide if here is None else here


def enabled(**options: Any) -> EnabledScope:
    """A scope that rewrites attention in what this thread compiles: ``with enabled(): ...``, or a decorator.

    ``options`` are set for the scope, as by ``config.patch``.  The object can be entered again, nested and
    from several threads, where each enters for itself.
    """
    if unknown := sorted(set(options) - set(config.names())):
        raise AttributeError(f"sdpa_rewrite.config.{unknown[0]} does not exist; there are {', '.join(config.names())}")
    return EnabledScope({"enabled": True, **options})


class EnabledScope(contextlib.ContextDecorator):
    """What ``enabled()`` returns."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def __enter__(self) -> None:
        scope = config.patch(self._options)
        scope.__enter__()
        _scopes.set((*_scopes.get(), scope))

    def __exit__(self, *exception: object) -> None:
        if not _scopes.get():
            raise RuntimeError("this thread (or context) leaves an enabled() scope that it did not enter")
        *outer, scope = _scopes.get()
        _scopes.set(tuple(outer))
        scope.__exit__(*exception)


def _switch(on: bool) -> None:
    global _process_wide
    _process_wide = on
    config.enabled = None  # what this thread said before no longer counts: the last word does


def _with_ours(option: Any) -> Any:
    if not is_enabled():
        return option
    from sdpa_rewrite.graph_pass import AttentionPass, PassChain, passes_of

    passes = passes_of(option)
    if any(isinstance(each, AttentionPass) for each in passes):
        return option  # set by hand: once is enough
    # not just attention_pass: whoever keeps the chain that is read here must not keep us on after the scope
    ours = AttentionPass(is_enabled)
    return PassChain((*passes, ours)) if passes else ours


def _install(inductor_config: ModuleType) -> None:
    compat.derive_option(inductor_config, "joint_custom_pre_pass", _with_ours)


def _lets_flex_attention_train(device: str) -> bool:
    """Whether a call of FlexAttention that torch refuses, since it has no backward on CPU, is going to be ours."""
    return device == "cpu" and (is_enabled() or compat.compiling_backend() == "sdpa_rewrite")


compat.when_imported("torch._inductor.config", _install)
compat.when_imported(
    "torch.nn.attention.flex_attention", lambda module: compat.allow_backward(module, _lets_flex_attention_train)
)
