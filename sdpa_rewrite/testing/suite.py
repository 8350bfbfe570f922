"""The suite of a pattern: its own function in all cases, and near misses."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdpa_rewrite import report
from sdpa_rewrite.authoring import registry
from sdpa_rewrite.authoring.lifted import lifted_variant, lifted_variants
from sdpa_rewrite.authoring.mutation import Mutant, mutants
from sdpa_rewrite.authoring.parameters import Variant
from sdpa_rewrite.authoring.pattern import Pattern
from sdpa_rewrite.authoring.replace import small_inputs
from sdpa_rewrite.authoring.trial import obstacle
from sdpa_rewrite.outcome import Outcome
from sdpa_rewrite.testing.assertions import reasons_of
from sdpa_rewrite.testing.running import difference, exactly, run, traced


@dataclass(frozen=True)
class Case:
    """One way of running a pattern's own function."""

    dtype: torch.dtype = torch.float32
    training: bool = False
    dynamic: bool = False
    batch: int = 2
    permuted: bool = False

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch."), "training" if self.training else "inference"]
        words += ["dynamic" if self.dynamic else "static", f"batch {self.batch}"]
        return ", ".join([*words, "permuted" if self.permuted else "contiguous"])


def cases(
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    training: Sequence[bool] = (False, True),
    dynamic: Sequence[bool] = (False, True),
    batch: Sequence[int] = (1, 2),
    permuted: Sequence[bool] = (False, True),
) -> Iterator[Case]:
    """All combinations."""
    yield from itertools.starmap(Case, itertools.product(dtypes, training, dynamic, batch, permuted))


PAIRWISE: tuple[Case, ...] = (
    Case(torch.float32, False, False, 1, False),
    Case(torch.float32, True, True, 2, False),
    Case(torch.bfloat16, True, False, 2, True),
    Case(torch.bfloat16, False, True, 1, True),
    Case(torch.float32, True, False, 1, True),
    Case(torch.bfloat16, False, False, 2, False),
)
"""Few cases in which every two of their properties meet (but for dynamic ones, which cost most)."""


@dataclass(frozen=True)
class Failure:
    """What failed in which case."""

    case: str
    text: str

    def __str__(self) -> str:
        return f"{self.case}: {self.text}"


@dataclass(frozen=True)
class Checked:
    """How much ``check_pattern`` tried: cases, near misses by mutation, and those that the pattern declares."""

    cases: int
    near_misses: int
    declared: int


def check_pattern(
    pattern: Pattern,
    *,
    cases: Sequence[Case] | None = None,
    near_misses: int = 20,
    scalars: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Checked:
    """All that a pattern must show, and how much was tried.  Raises ``AssertionError`` with every failure, and
    ``PatternError`` where the pattern cannot be read.

    - It matches its own function in all ``cases`` (default: both types, inference and training, static and dynamic,
      batch of one and two, contiguous and permuted; for each choice and option), and what runs then computes what the
      function does, with the same gradients.
    - Of the ``near_misses`` that are made of it by mutation, and that compute something else, none is computed wrongly,
      nor of those it declares.

    ``scalars``: values for its scalar parameters (0.5 by default).
    """
    values = scalars or {p.name: 0.5 for p in pattern.parameters if p.kind == "scalar"}
    wanted = list(_default_cases() if cases is None else cases)
    _ = list(lifted_variants(pattern))  # what cannot be read is told as that, not by what fails in a run of it
    inputs = arguments(pattern.variants[0], Case(training=True), values, seed)
    made = list(itertools.islice(_others(pattern, inputs, seed), near_misses))
    failures = [
        *(f for variant in pattern.variants for f in _own_failures(pattern, variant, wanted, values, seed)),
        *_near_failures(pattern, made, inputs),
    ]
    if failures:
        raise AssertionError("\n".join([f"pattern {pattern.name}:", *(f"  {f}" for f in failures)]))
    return Checked(len(wanted) * len(pattern.variants), len(made), len(pattern.near_misses))


def _default_cases() -> Iterator[Case]:
    yield from cases()


def _own_failures(
    pattern: Pattern, variant: Variant, wanted: Sequence[Case], scalars: Mapping[str, float], seed: int
) -> Iterator[Failure]:
    for case in wanted:
        text = _matches_its_own(pattern, variant, case, scalars, seed)
        if text:
            yield Failure(" ".join(filter(None, (str(case), str(variant)))), text)


def _others(pattern: Pattern, inputs: Mapping[str, Any], seed: int) -> Iterator[Mutant]:
    """Mutants that run on ``inputs`` and compute something else than the pattern, or have another gradient."""
    own = _values(pattern.function, {**pattern.variants[0].fixed, **inputs})
    for mutant in mutants(lifted_variant(pattern, 0), seed):
        if mutant.is_sane(inputs) and _are_different(own, _values(mutant.function, inputs)):
            yield mutant


def _values(function: Callable[..., Any], inputs: Mapping[str, Any]) -> list[Tensor | None]:
    return run(lambda *args: function(**dict(zip(inputs, args, strict=True))), list(inputs.values()))


def _are_different(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """Whether one of the values is another, by more than rounding explains."""
    if [x if x is None else x.shape for x in some] != [x if x is None else x.shape for x in others]:
        return True
    pairs = [(x, y) for x, y in zip(some, others, strict=True) if x is not None and y is not None]
    return any(not torch.allclose(x, y, rtol=1e-3, atol=1e-4, equal_nan=True) for x, y in pairs)


def _near_failures(pattern: Pattern, made: Sequence[Mutant], inputs: Mapping[str, Any]) -> Iterator[Failure]:
    for mutant in made:
        if text := _stays_right(pattern, mutant.function, inputs)[0]:
            yield Failure(f"near miss: {mutant.what}", text)
    for what, function in pattern.near_misses.items():
        text, sites = _stays_right(pattern, function, {**pattern.variants[0].fixed, **inputs})
        if text or any(pattern.name in names_of(o) and o.status != "missed" for o in sites):
            yield Failure(f"near miss: {what}", text or "taken for the form")


def _matches_its_own(pattern: Pattern, variant: Variant, case: Case, scalars: Mapping[str, float], seed: int) -> str:
    inputs = arguments(variant, case, scalars, seed)
    try:
        sites = _judged(pattern, pattern.function, {**variant.fixed, **inputs}, case.dynamic)
    except AssertionError as error:
        return str(error)
    own = [o for o in sites if pattern.name in names_of(o)]
    if not own:
        why = "; ".join(r for o in sites for r in reasons_of(o)) or obstacle(pattern, scalars) or "no candidate"
        return f"it does not match its own trace: {why}"
    if pattern.replacement is not None and not any(o.emitter == f"pattern {pattern.name}" for o in own):
        return f"not rewritten: {'; '.join(r for o in own for r in reasons_of(o))}"
    return ""


def names_of(outcome: Outcome) -> set[str]:
    """The pattern that took a place, and the named forms that it is."""
    forms = outcome.form.name.replace(" ", "_").split("_+_") if outcome.form is not None else []
    return {str(outcome.details.get("pattern", "")), *forms} - {""}


def _stays_right(
    pattern: Pattern, function: Callable[..., Any], inputs: Mapping[str, Any]
) -> tuple[str, tuple[Outcome, ...]]:
    """What is wrong with a near miss when it is compiled, and what became of it."""
    try:
        function(**{k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.items()})
    except Exception:
        return "", ()  # not a program on these shapes
    try:
        return "", _judged(pattern, function, inputs, dynamic=False)
    except AssertionError as error:
        return str(error), ()


def arguments(variant: Variant, case: Case, scalars: Mapping[str, float], seed: int = 0) -> dict[str, Any]:
    """Random arguments for a pattern's function."""
    cpu = torch.device("cpu")
    made = dict(small_inputs(variant, scalars, case.dtype, cpu, seed=seed, grad=case.training, first=case.batch))
    if case.permuted:
        made = {n: _permuted(x) if isinstance(x, Tensor) and x.dim() > 2 else x for n, x in made.items()}
    return made


def _permuted(x: Tensor) -> Tensor:
    """The same values in other strides: as (batch, row, head, ...) is seen as (batch, head, row, ...)."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(x.requires_grad)


def _judged(
    pattern: Pattern, function: Callable[..., Any], inputs: Mapping[str, Any], dynamic: bool
) -> tuple[Outcome, ...]:
    names = [n for n, x in inputs.items() if isinstance(x, Tensor)]
    others = {n: x for n, x in inputs.items() if n not in names}
    tensors = [inputs[n] for n in names]

    def positional(*values: Any) -> Any:
        return function(**others, **dict(zip(names, values, strict=True)))

    with registry.scope(pattern), report.collect() as collected, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = run(traced(positional, dynamic), tensors)
    if collected.failures:
        raise AssertionError(f"the pass failed: {collected.failures[0]}")
    eager = run(positional, tensors)
    wrong = difference(ours, eager, exactly(positional, tensors, eager))
    if wrong and not _is_random(positional, tensors):
        raise AssertionError(wrong)
    return tuple(collected.sites)


def _is_random(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether two runs draw different numbers: then there is nothing to compare."""
    first, second = (run(function, args, seed) for seed in (0, 1))
    return any(x is not None and y is not None and not torch.equal(x, y) for x, y in zip(first, second, strict=True))
