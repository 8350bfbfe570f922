"""What an author writes: a pattern, its replacement, its conditions.

@sdpa_rewrite.pattern
def gated_attention(
    q: Annotated[Tensor, "b h i d"], k: Annotated[Tensor, "b h j d"], v: Annotated[Tensor, "b h j e"],
    gate: Annotated[Tensor, "b h i e"], scale: Scalar,
) -> Tensor:
    return ((q @ k.mT) * scale).softmax(-1) @ v * gate.sigmoid()

@gated_attention.replace
def fused(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: float) -> Tensor: ...

@gated_attention.check
def wants_cuda(m: Match) -> None:
    if m["q"].device.type != "cuda":
        raise NoMatch(f"q is on {m['q'].device}", at=m["q"])
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, overload

import torch

from sdpa_rewrite.authoring.parameters import Parameter, PatternError, Variant, parameters_of, variants_of

Function = TypeVar("Function", bound=Callable[..., Any])
Size = Any  # an int, or a sympy expression under dynamic shapes


class NoMatch(Exception):
    """Raised by a check: the place is left alone for this reason.  ``at``: the tensor that is the culprit."""

    def __init__(self, reason: str, at: MatchedTensor | MatchedScalar | None = None) -> None:
        super().__init__(reason)
        self.reason, self.at = reason, at


@dataclass(frozen=True)
class MatchedTensor:
    """What a tensor parameter is in the graph.  ``shape`` is in the pattern's axes, whatever the graph's layout."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    contiguous: bool
    node: str = field(repr=False)
    source: str = field(default="", repr=False)


@dataclass(frozen=True)
class MatchedScalar:
    """What a scalar parameter is: ``value`` is a number, a sympy expression, or None for a 0-d tensor."""

    name: str
    value: Any
    requires_grad: bool
    node: str = field(default="", repr=False)
    source: str = field(default="", repr=False)


@dataclass(frozen=True)
class Match:
    """One place where a pattern matches, as a check sees it.

    ``m["q"]``: a parameter; ``m.sizes["d"]``: an axis (an int, or a sympy expression); ``m.choices``: the values of
    choices, None for options that are not there; ``m.training``: whether the graph has the backward.
    """

    parameters: Mapping[str, MatchedTensor | MatchedScalar]
    sizes: Mapping[str, Size]
    choices: Mapping[str, Any]
    training: bool
    source: str

    def __getitem__(self, name: str) -> Any:
        return self.parameters[name]

    def __contains__(self, name: str) -> bool:
        return name in self.parameters


@dataclass(eq=False)
class Pattern:
    """An attention form: what it computes, what takes its place, and when.  Made by ``sdpa_rewrite.pattern``."""

    function: Callable[..., Any]
    name: str
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    priority: int = 0
    trusted: bool = False
    why_not: str = ""
    names_sites: bool = False
    replacement: Callable[..., Any] | None = None
    checks: list[Callable[[Match], None]] = field(default_factory=list)
    near_misses: dict[str, Callable[..., Any]] = field(default_factory=dict)
    declared: tuple[Parameter, ...] = ()

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """What the signature declares, unless it was declared apart."""
        return self.declared or parameters_of(self.function)

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """Every reading: each value of a choice, with and without each option."""
        return tuple(variants_of(self.parameters))

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The pattern's function: an attention like any other."""
        return self.function(*args, **kwargs)

    def replace(self, function: Function) -> Function:
        """Let ``function`` take the place of what matches: plain differentiable PyTorch, or operators with autograd.

        It gets the pattern's parameters by name, tensors in the axes that the pattern declares, and returns what the
        pattern returns.
        """
        mine, theirs = (tuple(inspect.signature(f).parameters) for f in (self.function, function))
        if mine != theirs:
            raise PatternError(f"{self.name}: the replacement takes ({', '.join(theirs)}), not ({', '.join(mine)})")
        self.replacement = function
        return function

    def check(self, function: Callable[[Match], None]) -> Callable[[Match], None]:
        """Ask ``function`` before a rewrite: it raises ``NoMatch`` with a reason to leave the place alone."""
        self.checks.append(function)
        return function

    def near_miss(self, what: str) -> Callable[[Function], Function]:
        """A program of the same parameters that is not this form; ``testing.check_pattern`` sees to it.

        ``what``: what is different.
        """

        def add(function: Function) -> Function:
            self.near_misses[what] = function
            return function

        return add

    def key(self) -> str:
        """A hash over all that the pattern does: part of the key of Inductor's caches."""
        parts = [
            self.name,
            *map(str, self.declared),
            repr((self.devices, self.dtypes, self.priority, self.trusted, self.why_not, self.names_sites)),
        ]
        parts += [source_of(f) for f in (self.function, self.replacement, *self.checks) if f is not None]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def __reduce__(self) -> Any:
        """Pickled by where it stands: the module that holds it registers it on import."""
        return _load, (self.function.__module__, self.function.__qualname__)

    def __repr__(self) -> str:
        return f"<pattern {self.name}({', '.join(map(str, self.parameters))})>"


def _load(module: str, qualname: str) -> Any:
    import importlib

    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def source_of(function: Callable[..., Any]) -> str:
    """The source of a function and the values that it closes over; its code where there is no source."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        text = repr((code.co_code, code.co_consts, code.co_names)) if code is not None else repr(function)
    cells = [c.cell_contents for c in getattr(function, "__closure__", None) or () if _filled(c)]
    numbers = {n: v for n, v in sorted(_globals(function).items()) if isinstance(v, (bool, int, float, str))}
    defaults = getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)
    return "\0".join([text, *(_value(c) for c in cells), repr(numbers), repr(defaults)])


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _globals(function: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    names = code.co_names if code is not None else ()
    return {n: function.__globals__[n] for n in names if n in getattr(function, "__globals__", {})}


def _value(value: Any) -> str:
    return source_of(value) if inspect.isfunction(value) else repr(value)


@overload
def pattern(function: Callable[..., Any], /) -> Pattern: ...
@overload
def pattern(
    *,
    name: str = ...,
    devices: str | Iterable[str] = ...,
    dtypes: torch.dtype | Iterable[torch.dtype] = ...,
    priority: int = ...,
    trusted: bool = ...,
    why_not: str = ...,
    register: bool = ...,
) -> Callable[[Callable[..., Any]], Pattern]: ...
def pattern(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    devices: str | Iterable[str] = (),
    dtypes: torch.dtype | Iterable[torch.dtype] = (),
    priority: int = 0,
    trusted: bool = False,
    why_not: str = "",
    register: bool = True,
) -> Pattern | Callable[[Callable[..., Any]], Pattern]:
    """Declare a pattern: a function of annotated parameters, in plain PyTorch.

    ``devices`` and ``dtypes``: where the replacement runs (of the first tensor; all, if none are given).
    ``priority``: of two patterns at one place the higher one wins.  ``trusted``: the replacement is not run on small
    random instances to compare it with the pattern (an operator that takes large sizes only, say).
    ``why_not``: the reason to show for a pattern without a replacement.  ``register``: False for a pattern
    that ``sdpa_rewrite.patterns.scope`` switches on.  Raises ``PatternError`` for a declaration that cannot be read.
    """
    from sdpa_rewrite.authoring import registry

    where = (devices,) if isinstance(devices, str) else tuple(devices)
    types = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)

    def declare(declared: Callable[..., Any]) -> Pattern:
        made = Pattern(declared, name or declared.__name__, where, types, priority, trusted, why_not)
        _ = made.parameters  # a wrong declaration is told here, not when something compiles
        if register:
            registry.register(made)
        return made

    return declare if function is None else declare(function)


def named_form(function: Callable[..., Any], /) -> Pattern:
    """Declare a name for attentions that the engine takes anyway: those that have all that is particular to this one.

    Spelling, sizes, types and numbers do not matter.  Forms combine: what is causal and has dropout has both names.
    """
    from sdpa_rewrite.authoring import registry

    made = Pattern(function, function.__name__, names_sites=True)
    _ = made.parameters
    registry.register(made)
    return made
