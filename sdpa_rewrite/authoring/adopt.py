"""Patterns written for ``torch._inductor.pattern_matcher.register_replacement``, as patterns of ours.

What these leave to their examples is found here: which numbers are scalars, which axes are one, and which scalar is the
probability of a dropout.  A replacement of that style draws a dropout mask of its own, which is not the one that the
program draws: such a pattern is adopted for places that drop out nothing, and the others are left to the engine, which
keeps the mask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sdpa_rewrite.algebra.term import subterms
from sdpa_rewrite.authoring import registry
from sdpa_rewrite.authoring.lifted import lifted_variants
from sdpa_rewrite.authoring.parameters import Parameter, PatternError, Variant
from sdpa_rewrite.authoring.pattern import Match, MatchedScalar, MatchedTensor, NoMatch, Pattern
from sdpa_rewrite.authoring.trace import axes_that_agree
from sdpa_rewrite.authoring.trial import obstacle
from sdpa_rewrite.lift.ops import CASTS, is_call, opname, value_of

SOME_NUMBER = 0.37  # for a scalar of which there is only an example
DROPOUTS = (F.dropout, torch.dropout, torch.native_dropout)
PRODUCTS = frozenset({"matmul", "mm", "bmm", "einsum", "baddbmm", "addmm", "linear"})  # of one type, in eager


def adopt(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Tensor],
    *,
    scalar_workaround: Mapping[str, float] | None = None,
    extra_check: Callable[[Any], bool] | None = None,
    name: str = "",
    register: bool = True,
) -> Pattern:
    """A pattern from the arguments of ``register_replacement``.

    ``example_inputs`` say how many dimensions each tensor has (none: it is a scalar); which of these are one axis is
    found by tracing, and sizes and types do not matter.  ``scalar_workaround``: the names count, as scalars; the values
    do not.  A scalar that is the probability of a dropout is 0: places with dropout are not matched.  ``extra_check``
    gets an object with ``kwargs`` and ``nodes``, as torch's ``Match`` has.  One pattern serves inference and
    training, every type, and a batch of one, so it is adopted once.  Raises ``PatternError``.
    """
    order, numbers = list(inspect.signature(search_fn).parameters), dict(scalar_workaround or {})
    names = [n for n in order if n not in numbers]
    if len(names) != len(example_inputs):
        raise PatternError(f"{search_fn.__name__}: {len(example_inputs)} example inputs for {', '.join(names)}")
    tensors = {n: x for n, x in zip(names, example_inputs, strict=True) if x.dim()}
    observed = observe(search_fn, dict(zip(names, example_inputs, strict=True)), order)
    written = [_parameter(n, tensors.get(n), n in observed.probabilities) for n in order]
    if observed.multiplies_half:
        written = [_in_half(p) for p in written]
    same = _axes_that_agree(search_fn, written, tensors)
    letters = dict(zip(dict.fromkeys(same.values()), string.ascii_lowercase, strict=False))
    declared = tuple(_renamed(p, {a: letters[b] for a, b in same.items()}) for p in written)
    made = Pattern(search_fn, name or search_fn.__name__, declared=declared)
    if _casts_down(made):
        made = Pattern(search_fn, made.name, declared=tuple(_in_half(p) for p in declared))
    made.replace(replace_fn)
    if extra_check is not None:
        made.check(_Check(search_fn, extra_check))
    _try_numbers(made, numbers)
    return registry.register(made) if register else made


def _parameter(name: str, example: Tensor | None, probability: bool) -> Parameter:
    if probability:
        return Parameter(name, "choice", choices=(0.0,))
    if example is None:
        return Parameter(name, "scalar")
    axes = tuple(1 if size == 1 else f"{name}_{k}" for k, size in enumerate(example.shape))
    return Parameter(name, "tensor", axes, None if example.dtype.is_floating_point else example.dtype)


def _renamed(parameter: Parameter, names: Mapping[str, str]) -> Parameter:
    axes = tuple(names[a] if isinstance(a, str) else a for a in parameter.axes)
    return dataclasses.replace(parameter, axes=axes)


def _casts_down(pattern: Pattern) -> bool:
    """Whether a tensor is cast to a smaller type by name: then it is of that type, or the cast could overflow."""
    for lifted in lifted_variants(pattern):
        leaves = [t.attr[0] for term in lifted.terms for t in subterms(term) if t.op == "leaf"]
        if any(is_call(n) and opname(n) in CASTS and value_of(n).dtype == torch.float16 for n in leaves):
            return True
    return False


def _in_half(parameter: Parameter) -> Parameter:
    floating = parameter.kind == "tensor" and parameter.dtype is None
    return dataclasses.replace(parameter, dtype=torch.float16) if floating else parameter


# -- which axes are one ---------------------------------------------------------------------------------------------


def _axes_that_agree(
    function: Callable[..., Any], parameters: Sequence[Parameter], tensors: Mapping[str, Tensor]
) -> dict[str, str]:
    """Which axis each axis is.

    As few are one as the function can do with.  One that views a tensor by another's sizes says so only where it fails;
    then axes of the same place and size in the examples are tried.
    """
    hints = {f"{n}_{k}": int(size) for n, x in tensors.items() for k, size in enumerate(x.shape)}
    first: PatternError | None = None
    for together in _places_together(parameters, hints):
        renamed = [_renamed(p, {a: together.get(a, a) for a in p.axes if isinstance(a, str)}) for p in parameters]
        variant = Variant(
            tuple(p for p in renamed if p.kind != "choice"), {p.name: 0.0 for p in renamed if p.kind == "choice"}
        )
        try:
            same = axes_that_agree(function, variant, hints)
            axes_that_agree(function, _with_axes(variant, same))  # at any sizes, not at the examples' alone
        except PatternError as error:
            first = first or error
        else:
            return {a: same[together.get(a, a)] for p in parameters for a in p.axes if isinstance(a, str)}
    assert first is not None
    raise first


def _with_axes(variant: Variant, same: Mapping[str, str]) -> Variant:
    return Variant(tuple(_renamed(p, same) for p in variant.parameters), variant.fixed)


def _places_together(parameters: Sequence[Parameter], hints: Mapping[str, int]) -> Iterator[dict[str, str]]:
    """Axes to be taken for another tensor's of the same place and size: none, then those of one place, of two, ..."""
    rank = max(len(p.axes) for p in parameters)
    for count in range(rank):
        for places in itertools.combinations(range(rank), count):
            together: dict[str, str] = {}
            first: dict[tuple[int, int], str] = {}
            for k, axis in ((k, a) for p in parameters if len(p.axes) == rank for k, a in enumerate(p.axes)):
                if isinstance(axis, str) and k in places:
                    together[axis] = first.setdefault((k, hints[axis]), axis)
            yield together


# -- what the function does with what it is given --------------------------------------------------------------------


@dataclass
class Observed:
    """What a run of the function showed.

    ``probabilities``: the parameters without an example that it hands to a dropout as its probability.
    ``multiplies_half``: whether it multiplies what it casts to float16 by what is not: eager can do that only where all
    is float16.
    """

    probabilities: set[str] = field(default_factory=set)
    multiplies_half: bool = False


def observe(function: Callable[..., Any], examples: Mapping[str, Tensor], order: Sequence[str]) -> Observed:
    """Run ``function`` on tensors like ``examples``, in float32."""
    found = Observed()
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = {n: _in_float32(examples[n]) if n in examples else torch.empty(()) for n in order}
        mode = _Observing(found, {id(x): n for n, x in given.items() if not x.dim()})
        with contextlib.suppress(Exception), mode, torch.no_grad():  # what is wrong is told where it is traced
            function(**given)
    return found


def _in_float32(example: Tensor) -> Tensor:
    return torch.empty_like(example, dtype=torch.float32 if example.is_floating_point() else example.dtype)


class _Observing(TorchFunctionMode):
    """Notes in ``found`` what is done; nothing is dropped, and products of two types are taken in float16."""

    def __init__(self, found: Observed, scalars: Mapping[int, str]) -> None:
        super().__init__()
        self.found, self.scalars = found, scalars

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip(("input", "p"), args, strict=False)), **(kwargs or {})}
        if func in DROPOUTS and id(given.get("p")) in self.scalars:
            self.found.probabilities.add(self.scalars[id(given["p"])])
            return given["input"]
        if getattr(func, "__name__", "").strip("_") in PRODUCTS:
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if len({x.dtype for x in tensors}) > 1 and any(x.dtype == torch.float16 for x in tensors):
                self.found.multiplies_half = True
                args, kwargs = pytree.tree_map_only(Tensor, Tensor.half, (args, kwargs))
        return func(*args, **(kwargs or {}))


# -- scalars that have to be numbers --------------------------------------------------------------------------------


def _try_numbers(pattern: Pattern, numbers: Mapping[str, float]) -> None:
    """Raise ``PatternError`` where the pattern is found with 0-d tensors for its scalars, and not with numbers.

    Some operators have a form of their own for a number (``pow``), which no program with numbers has in common with it.
    """
    scalars = {p.name: numbers.get(p.name, SOME_NUMBER) for p in pattern.parameters if p.kind == "scalar"}
    told = obstacle(pattern, scalars) if scalars else ""
    if told and not obstacle(pattern, {}):
        given = ", ".join(f"{name}={value:g}" for name, value in scalars.items())
        raise PatternError(f"{pattern.name}: with numbers ({given}) it is another form: {told}")


# -- checks ---------------------------------------------------------------------------------------------------------


class _Check:
    """An ``extra_check`` as a check of ours: it sees the search function traced on what was matched, as in torch."""

    def __init__(self, search_fn: Callable[..., Any], check: Callable[[Any], bool]) -> None:
        self.search_fn, self.__wrapped__ = search_fn, check

    def __call__(self, match: Match) -> None:
        if not self.__wrapped__(self._as_torch_has_it(match)):
            raise NoMatch(f"{getattr(self.__wrapped__, '__name__', 'extra_check')} says no")

    def _as_torch_has_it(self, match: Match) -> Any:
        numbers = {n: p.value for n, p in match.parameters.items() if not isinstance(p, MatchedTensor)}
        given = {**match.choices, **{n: x for n, x in numbers.items() if isinstance(x, (int, float))}}
        names = [n for n in match.parameters if n not in given]
        with FakeTensorMode(), torch.no_grad():
            values = [_fake(match.parameters[n]) for n in names]
            module = make_fx(lambda *xs: self.search_fn(**given, **dict(zip(names, xs, strict=True))))(*values)
        inputs: dict[str, Any] = dict(zip(names, module.graph.find_nodes(op="placeholder"), strict=True))
        return SimpleNamespace(kwargs={**given, **inputs}, nodes=[n for n in module.graph.nodes if is_call(n)])


def _fake(parameter: MatchedTensor | MatchedScalar) -> Tensor:
    """A tensor like one that was matched; what is symbolic has some size."""
    if isinstance(parameter, MatchedScalar):
        return torch.empty(())
    sizes = (sympy.sympify(n) for n in parameter.shape)
    shape = [int(n.xreplace({s: sympy.Integer(8) for s in n.free_symbols})) for n in sizes]
    return torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
