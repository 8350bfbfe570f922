"""What a pattern's signature declares: tensors with named axes, scalars, choices, options, programs.

q: Annotated[Tensor, "b h i d"]                 a tensor with these axes (a number is an axis of that size)
mask: Annotated[Tensor, "b j", torch.bool]      ... of this type; without one, any floating type
scale: Scalar                                   a number, a symbolic number or a 0-d tensor
score: Program                                  any pointwise function of what the pattern gives it
kind: Literal["relu", "gelu"], causal: bool     a choice: the pattern is what Python makes of each value
bias: Annotated[Tensor, "h i j"] | None = None  an option: with it and without
"""

from __future__ import annotations

import inspect
import itertools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import torch
from torch import Tensor


class _Marker:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


SCALAR, PROGRAM = _Marker("Scalar"), _Marker("Program")

Scalar: TypeAlias = Annotated[float | Tensor, SCALAR]
"""A number of the pattern: ``float``, symbolic number or 0-d tensor in the graph, whichever the user wrote."""

Program: TypeAlias = Annotated[Callable[[Tensor], Tensor], PROGRAM]
"""A pointwise hole of the pattern: ``score(s)`` is any pointwise function of ``s``, of other tensors and of indices."""

Kind = Literal["tensor", "scalar", "program", "choice"]
Axis: TypeAlias = "str | int"


class PatternError(TypeError):
    """The pattern itself is wrong: its declaration, or what it computes."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a pattern.  ``axes`` and ``dtype`` are a tensor's, ``choices`` a choice's values."""

    name: str
    kind: Kind
    axes: tuple[Axis, ...] = ()
    dtype: torch.dtype | None = None
    choices: tuple[Any, ...] = ()
    optional: bool = False

    def __str__(self) -> str:
        text = {
            "tensor": f"[{' '.join(map(str, self.axes))}]" + (f" {self.dtype}" if self.dtype else ""),
            "scalar": "scalar",
            "program": "program",
            "choice": " | ".join(map(repr, self.choices)),
        }[self.kind]
        return f"{self.name}: {text}" + (" | None" if self.optional else "")


@dataclass(frozen=True)
class Variant:
    """One reading of a pattern: values for its choices, which options it has, the parameters that are left."""

    parameters: tuple[Parameter, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.fixed.items())


def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """What the signature of ``function`` declares.  Raises ``PatternError``."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise PatternError(f"{function.__name__}: an annotation cannot be read here: {error}") from error
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PatternError(f"{function.__name__}: {parameter} is not a parameter of one value")
        if name not in hints:
            raise PatternError(f'{function.__name__}: {name} is not declared; write {name}: Annotated[Tensor, "b i d"]')
        found.append(_parameter(function, name, hints[name], parameter.default))
    if not any(p.kind == "tensor" for p in found):
        raise PatternError(f"{function.__name__}: a pattern has at least one tensor with named axes")
    return tuple(found)


def _parameter(function: Callable[..., Any], name: str, hint: Any, default: Any) -> Parameter:
    optional = get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)
    if optional:
        (hint,) = (a for a in get_args(hint) if a is not type(None))
    elif default is not inspect.Parameter.empty:
        raise PatternError(f"{function.__name__}: {name} has a default; only an option (... | None = None) may")
    extras = hint.__metadata__ if get_origin(hint) is Annotated else ()
    if SCALAR in extras:
        return Parameter(name, "scalar", optional=optional)
    if PROGRAM in extras:
        return Parameter(name, "program", optional=optional)
    if hint is bool:
        return Parameter(name, "choice", choices=(False, True), optional=optional)
    if get_origin(hint) is Literal:
        return Parameter(name, "choice", choices=get_args(hint), optional=optional)
    texts = [e for e in extras if isinstance(e, str)]
    dtypes = [e for e in extras if isinstance(e, torch.dtype)]
    if len(texts) != 1 or len(dtypes) > 1 or len(texts) + len(dtypes) != len(extras):
        raise PatternError(
            f"{function.__name__}: {name}: {hint} is none of "
            'Annotated[Tensor, "b h i d"], Scalar, Program, Literal[...], bool, or one of these | None = None'
            + next((text for kind, text in MEANT if hint is kind), "")
        )
    return Parameter(name, "tensor", _axes(function, name, texts[0]), next(iter(dtypes), None), optional=optional)


MEANT = (
    (Tensor, "; a tensor needs the names of its axes"),
    (float, "; a number is a Scalar"),
    (int, "; a number is a Scalar"),
)


def _axes(function: Callable[..., Any], name: str, text: str) -> tuple[Axis, ...]:
    axes: list[Axis] = []
    for word in text.split():
        if word.isdigit():
            axes.append(int(word))
        elif word.isidentifier():
            axes.append(word)
        else:
            what = f"{word!r} is no name of an axis; between names stand spaces"
            raise PatternError(f"{function.__name__}: {name}: {what}")
    return tuple(axes)


def variants_of(parameters: tuple[Parameter, ...]) -> Iterator[Variant]:
    """Every reading of a pattern, the one with all its options first."""
    spaces = [(*(p.choices or (_PRESENT,)), *((None,) if p.optional else ())) for p in parameters]
    for values in itertools.product(*spaces):
        fixed = {p.name: v for p, v in zip(parameters, values, strict=True) if v is not _PRESENT}
        yield Variant(tuple(p for p in parameters if p.name not in fixed), fixed)


_PRESENT = object()
