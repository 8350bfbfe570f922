"""Patterns written for ``torch._inductor.pattern_matcher.register_replacement``, as patterns of ours."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sdpa_rewrite.authoring import registry
from sdpa_rewrite.authoring.parameters import Parameter, PatternError
from sdpa_rewrite.authoring.pattern import Match, MatchedTensor, NoMatch, Pattern
from sdpa_rewrite.authoring.trace import axes_that_agree


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

    ``example_inputs`` say how many dimensions each tensor has; which of these are one axis is found by tracing, and
    sizes and types do not matter.  ``scalar_workaround``: the names count, as scalars; the values do not.
    ``extra_check`` gets an object with ``kwargs``, as torch's ``Match`` has.  One pattern serves inference and
    training, every type, and a batch of one, so it is adopted once.  Raises ``PatternError``.
    """
    scalars = dict(scalar_workaround or {})
    names = [n for n in inspect.signature(search_fn).parameters if n not in scalars]
    if len(names) != len(example_inputs):
        raise PatternError(f"{search_fn.__name__}: {len(example_inputs)} example inputs for {', '.join(names)}")
    tensors = dict(zip(names, example_inputs, strict=True))
    parameters = [
        Parameter(n, "tensor", _axes(n, tensors[n]), _dtype(tensors[n])) if n in tensors else Parameter(n, "scalar")
        for n in inspect.signature(search_fn).parameters
    ]
    hints = {f"{n}_{k}": int(size) for n, x in tensors.items() for k, size in enumerate(x.shape)}
    same = axes_that_agree(search_fn, parameters, hints)
    letters = dict(zip(dict.fromkeys(same.values()), string.ascii_lowercase, strict=False))
    declared = tuple(
        Parameter(p.name, p.kind, tuple(letters[same[a]] if isinstance(a, str) else a for a in p.axes), p.dtype)
        for p in parameters
    )
    made = Pattern(search_fn, name or search_fn.__name__, declared=declared)
    made.replace(replace_fn)
    if extra_check is not None:
        made.check(_Check(extra_check))
    return registry.register(made) if register else made


def _axes(name: str, example: Tensor) -> tuple[str | int, ...]:
    return tuple(1 if size == 1 else f"{name}_{k}" for k, size in enumerate(example.shape))


def _dtype(example: Tensor) -> torch.dtype | None:
    return None if example.dtype.is_floating_point else example.dtype


class _Check:
    """An ``extra_check`` as a check of ours."""

    def __init__(self, check: Callable[[Any], bool]) -> None:
        self.__wrapped__ = check

    def __call__(self, match: Match) -> None:
        kwargs = {n: _node(p) if isinstance(p, MatchedTensor) else p.value for n, p in match.parameters.items()}
        if not self.__wrapped__(SimpleNamespace(kwargs=kwargs)):
            raise NoMatch(f"{self.__wrapped__.__name__} says no")


def _node(tensor: MatchedTensor) -> Any:
    shape = [n if isinstance(n, int) else 2 for n in tensor.shape]
    value = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return SimpleNamespace(meta={"val": value}, name=tensor.node)
