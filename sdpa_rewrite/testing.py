"""For authors of patterns: tests of a pattern in one line, and assertions about what becomes of a function.

    def test_my_pattern() -> None:
        sdpa_rewrite.testing.check_pattern(my_pattern)

    sdpa_rewrite.testing.assert_rewrites(my_model, [x], by="my_pattern")
    sdpa_rewrite.testing.assert_misses(my_model, [x], reason="also read by output")
    with sdpa_rewrite.testing.record_graphs() as graphs: ...

Nothing here generates code: graphs run operator by operator, so a test costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sdpa_rewrite import config, graph_pass, report
from sdpa_rewrite.authoring import registry, stage
from sdpa_rewrite.authoring.lifted import lifted_variant, lifted_variants
from sdpa_rewrite.authoring.mutation import Mutant, mutants
from sdpa_rewrite.authoring.parameters import Variant
from sdpa_rewrite.authoring.pattern import Pattern
from sdpa_rewrite.authoring.replace import small_inputs
from sdpa_rewrite.authoring.trial import obstacle
from sdpa_rewrite.outcome import Outcome
from sdpa_rewrite.report import Report

NOISE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.04, torch.float16: 0.006}
ALLOWED = 3.0  # times the error of the function as written


# -- what becomes of a function -----------------------------------------------------------------------------------


def assert_rewrites(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    times: int = 1,
    by: str = "",
    patterns: Sequence[Pattern] = (),
    dynamic: bool = False,
) -> Report:
    """``fn(*args)`` is rewritten ``times`` times, and computes what it did, forward and backward.

    ``by``: the pattern or emitter that is counted; all, if empty.  ``patterns``: these are on, besides those that are.
    Raises ``AssertionError`` with the whole report.
    """
    told = compare(fn, args, patterns=patterns, dynamic=dynamic)
    done = _rewritten(told, by)
    if len(done) != times:
        raise AssertionError(f"rewritten {len(done)} times{f' by {by}' if by else ''}, not {times}\n{told}")
    return told


def assert_misses(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    reason: str = "",
    by: str = "",
    patterns: Sequence[Pattern] = (),
    dynamic: bool = False,
) -> Report:
    """``fn(*args)`` is not rewritten, for a reason that contains ``reason``, and computes what it did.

    ``by``: the pattern or emitter that must not; what a pattern leaves alone another may take.
    """
    told = compare(fn, args, patterns=patterns, dynamic=dynamic)
    done = _rewritten(told, by)
    reasons = [r for o in told.sites for r in _reasons(o)]
    if done or (reason and not any(reason in r for r in reasons)):
        raise AssertionError(f"{'rewritten' if done else f'no reason has {reason!r}'}\n{told}")
    return told


def _rewritten(told: Report, by: str) -> list[Outcome]:
    """The places that were rewritten, by a pattern or emitter if one is named."""
    return [o for o in told.sites if o.status == "fused" and by in ("", o.emitter, o.emitter.removeprefix("pattern "))]


def compare(
    fn: Callable[..., Any], args: Sequence[Any], *, patterns: Sequence[Pattern] = (), dynamic: bool = False
) -> Report:
    """Compile ``fn``, run it on ``args`` forward and backward, and compare with eager.  What became of it.

    ``fn``: a function of tensors, or a module, whose parameters get gradients as those ``args`` do that require one.
    Raises ``AssertionError`` where they differ by more than rounding.
    """
    with registry.scope(*patterns), report.collect() as collected, warnings.catch_warnings(), _thorough():
        warnings.simplefilter("ignore")
        ours = _run(_compiled(fn, dynamic), args)
    eager = _run(fn, args)
    exact = _run(_in_float64(fn), pytree.tree_map(_in_float64, list(args)))
    difference = _difference(ours, eager, exact)
    if difference:
        raise AssertionError(f"{difference}\n{Report(tuple(collected.sites), tuple(collected.failures))}")
    return Report(tuple(collected.sites), tuple(collected.failures), collected.graphs)


@contextlib.contextmanager
def _thorough() -> Iterator[None]:
    """Somebody reads the diagnosis of what is compiled in the block, as in ``explain``."""
    token = stage.thorough.set(True)
    try:
        yield
    finally:
        stage.thorough.reset(token)


@dataclass
class Recorded:
    """Graphs as text: ``before`` and ``after`` our pass, in the order of compilation."""

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@contextlib.contextmanager
def record_graphs() -> Iterator[Recorded]:
    """Record each graph that our pass sees in the block, before and after."""
    recorded = Recorded()
    with graph_pass.watched(lambda g: recorded.before.append(str(g)), lambda g: recorded.after.append(str(g))):
        yield recorded


# -- the suite of a pattern -----------------------------------------------------------------------------------------


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
    return _run(lambda *args: function(**dict(zip(inputs, args, strict=True))), list(inputs.values()))


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
        why = "; ".join(r for o in sites for r in _reasons(o)) or obstacle(pattern, scalars) or "no candidate"
        return f"it does not match its own trace: {why}"
    if pattern.replacement is not None and not any(o.emitter == f"pattern {pattern.name}" for o in own):
        return f"not rewritten: {'; '.join(r for o in own for r in _reasons(o))}"
    return ""


def _reasons(outcome: Outcome) -> Iterator[str]:
    """Why an outcome is no better: the patterns' reasons first."""
    yield from (str(outcome.details[k]) for k in ("pattern says", "nearest pattern") if k in outcome.details)
    yield from map(str, outcome.reasons)


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
        ours = _run(_traced(positional, dynamic), tensors)
    if collected.failures:
        raise AssertionError(f"the pass failed: {collected.failures[0]}")
    eager, exact = _run(positional, tensors), _run(positional, [_in_float64(x) for x in tensors])
    difference = _difference(ours, eager, exact)
    if difference and not _is_random(positional, tensors):
        raise AssertionError(difference)
    return tuple(collected.sites)


def _is_random(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether two runs draw different numbers: then there is nothing to compare."""
    first, second = (_run(function, args, seed) for seed in (0, 1))
    return any(x is not None and y is not None and not torch.equal(x, y) for x, y in zip(first, second, strict=True))


# -- compiling without code generation ------------------------------------------------------------------------------


def _compiled(fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """``fn`` through Dynamo, AOTAutograd and Inductor's passes, ours among them."""
    from sdpa_rewrite.backend import compile_with
    from sdpa_rewrite.explanation import run_in_eager

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_with(gm, example_inputs, {}, {"strict": True}, run_in_eager)

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, dynamic=dynamic)


def _traced(fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """``fn`` through AOTAutograd and our pass only: what Inductor's pass would see, in a tenth of the time."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    rewriting = graph_pass.AttentionPass()

    def inference(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        _rewrite(gm)
        return make_boxed_func(gm.forward)

    def _rewrite(gm: torch.fx.GraphModule) -> None:
        with config.patch(strict=True):
            rewriting(gm.graph)
        gm.recompile()

    def partition(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        _rewrite(gm)
        return min_cut_rematerialization_partition(gm, inputs, **options)

    def run(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(gm.forward)

    return aot_function(
        fn,
        fw_compiler=run,
        bw_compiler=run,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=dict(select_decomp_table()),
        dynamic=dynamic,
    )


# -- comparing --------------------------------------------------------------------------------------------------------


def _in_float64(x: Any) -> Any:
    if isinstance(x, torch.nn.Module):
        return copy.deepcopy(x).double()
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().to(torch.float64).requires_grad_(x.requires_grad)
    return x


def _run(fn: Callable[..., Any], args: Sequence[Any], seed: int = 0) -> list[Tensor | None]:
    """The results of ``fn`` on copies of ``args``, and the gradients of the args and parameters that require one."""

    def fresh(x: Any) -> Any:
        return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    own = pytree.tree_map(fresh, list(args))
    torch.manual_seed(seed)
    results = [x for x in pytree.tree_leaves(fn(*own)) if isinstance(x, Tensor)]
    learned = list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
    wanted = [x for x in (*pytree.tree_leaves(own), *learned) if isinstance(x, Tensor) and x.requires_grad]
    roots = [x for x in results if x.requires_grad]
    values: list[Tensor | None] = [x.detach() for x in results]
    if wanted and roots:
        draw = torch.Generator().manual_seed(1)
        seeds = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in roots]
        values += torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    return values


def _difference(ours: Sequence[Tensor | None], eager: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> str:
    """Where ``ours`` is worse than ``eager``, measured against float64; empty where it is as good."""
    if len(ours) != len(eager):
        return f"{len(ours)} values instead of {len(eager)}"
    for k, (x, y, z) in enumerate(zip(ours, eager, exact, strict=True)):
        if (x is None) != (y is None):
            return f"value {k}: {'no' if x is None else 'a'} gradient"
        if x is None or y is None or z is None:
            continue
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"value {k}: {x.dtype} {tuple(x.shape)} instead of {y.dtype} {tuple(y.shape)}"
        gap, allowed = _gap(x, y, z)
        if gap > allowed:
            return f"value {k}: an error of {gap:.3g} where {allowed:.3g} is allowed"
    return ""


def _gap(ours: Tensor, eager: Tensor, exact: Tensor) -> tuple[float, float]:
    a, b, c = (x.to(torch.float64) for x in (ours, eager, exact))
    odd = (a.isfinite() != b.isfinite()) & (a.isfinite() != c.isfinite())
    if odd.any():
        return math.inf, 0.0
    both = a.isfinite() & b.isfinite() & c.isfinite()
    if not both.any():
        return 0.0, 0.0
    size, error, written = (float(x[both].abs().max()) for x in (c, a - c, b - c))
    noise = NOISE.get(ours.dtype, 0.0)
    return error, ALLOWED * written + noise * (size + 0.1)
