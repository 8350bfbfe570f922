"""A replacement is checked against its pattern, traced forward and backward, and put in place of a region."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sdpa_rewrite import rewrite
from sdpa_rewrite.algebra.axes import Dims, Irregular, Refine
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.authoring.adjoint import Backward
from sdpa_rewrite.authoring.certify import result_dims
from sdpa_rewrite.authoring.parameters import Parameter, Variant
from sdpa_rewrite.authoring.pattern import Pattern
from sdpa_rewrite.authoring.region import Region
from sdpa_rewrite.authoring.trace import authors_line
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.emit.arrange import RealWorld, Sizes, Unavailable, arrange, restrided
from sdpa_rewrite.rewrite import Refused, Splice, Traced
from sdpa_rewrite.site import Operand

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
AXIS_SIZES = (2, 3, 5, 7, 4, 6)
SEEDS = (0, 1)


def put_in(
    graph: Graph, pattern: Pattern, region: Region, backward: Backward, order: dict[Node, int], held: frozenset[Node]
) -> list[Node]:
    """Replace ``region``.  Returns the new nodes.  Raises ``Refused``, or whatever a stage raises; leaves no trace."""
    assert pattern.replacement is not None
    results = [rewrite.settled(r, held) for r in region.roots]
    claims = [rewrite.settled(c.operand, held) for c in backward.gradients]
    try:
        traced = _traced(pattern, region, backward, results, claims, graph)
    except (Unavailable, Irregular, Refine) as error:
        raise Refused(str(error)) from error
    splice = Splice(graph)
    try:
        nodes = [c.node for c in claims]
        first = min((r.node for r in results), key=order.__getitem__)
        outputs = rewrite.insert(splice, region.roots[0].node, traced, first, nodes, order)
        rewrite.check(outputs, traced.results, forward=len(results))
        for old, new in zip(traced.results, outputs, strict=True):
            splice.move_readers(old.node, new)
        graph.lint()
        dead = rewrite.unread([old.node for old in traced.results])
    except BaseException:
        splice.undo()
        raise
    for node in dead:
        graph.erase_node(node)
    return list(splice.added)


def _traced(
    pattern: Pattern, region: Region, backward: Backward, results: list[Operand], claims: list[Operand], graph: Graph
) -> Traced:
    """The replacement, forward and backward, over the tensors that the region reads."""
    tensors = {name: region.operand(name) for name in region.tensors}
    scalars = {n: Operand(*t.attr) for n, t in region.scalars.items() if t.op == "leaf"}
    roles = {**tensors, **scalars}
    symbols = _symbols(graph, region)
    cotangents = {k: c for k, c in enumerate(backward.cotangents) if c is not None} if claims else {}
    nodes = [o.node for o in roles.values()]
    nodes += [c.node for c in cotangents.values()]
    nodes += list(symbols.values())
    wanted = list(dict.fromkeys(c.name for c in backward.gradients))

    def joint(*values: Any) -> list[Tensor]:
        given = dict(zip(roles, values, strict=False))
        numbers = dict(zip(symbols, values[len(values) - len(symbols) :], strict=True)) if symbols else {}
        sizes = Sizes([(given[r], o.dims) for r, o in roles.items()], numbers)
        with torch.enable_grad():
            leaves = {r: x.detach().requires_grad_(r in wanted) for r, x in given.items()} if wanted else given
            arguments: dict[str, Any] = dict(region.pattern.variant.fixed)
            for name, operand in tensors.items():
                groups = list(region.dims[name])
                arguments[name] = arrange(leaves[name], operand.dims, groups, sizes)
            for name in region.programs:
                captured = {n: arguments.pop(n) for n in region.programs[name].captures}
                arguments[name] = CaughtProgram(region, name, captured, sizes)
            for name, term in region.scalars.items():
                arguments[name] = leaves[name].reshape(()) if name in scalars else _number(term, sizes)
            assert pattern.replacement is not None
            try:
                returned = pytree.tree_leaves(pattern.replacement(**arguments))
            except Exception as error:  # the author's, and no failure of the pass
                here = f"; {', '.join(scalars)}: a 0-d tensor here" if scalars else ""
                raise Refused(f"the replacement failed: {_told(error)}{here}") from error
            outs = [returned[k] for k in region.pattern.kept]
            finals = [_result(region, k, x, results[k], sizes) for k, x in enumerate(outs)]
            if not wanted:
                return finals
            seeds = zip(cotangents.items(), values[len(roles) :], strict=False)
            pairs = [
                (outs[k], arrange(seed, c.dims, list(result_dims(region, k)), sizes).to(outs[k].dtype))
                for (k, c), seed in seeds
                if outs[k].requires_grad
            ]
            roots = [x for x, _ in pairs]
            found = torch.autograd.grad(roots, [leaves[n] for n in wanted], [g for _, g in pairs], allow_unused=True)
        grads = dict(zip(wanted, found, strict=True))
        return [
            *(x.detach() for x in finals),
            *(_gradient(region, c, grads, sizes) for c in zip(backward.gradients, claims, strict=True)),
        ]

    examples = [n.meta["val"] for n in nodes]
    mode = torch._guards.detect_fake_mode(examples)
    if mode is None:
        raise Refused("the graph has no fake tensors")
    with mode, torch.no_grad():
        module = make_fx(joint, rewrite.decompositions(), tracing_mode="real")(*examples)
    module.graph.eliminate_dead_code()
    return Traced(module, nodes, [*results, *claims], len(cotangents))


def _result(region: Region, k: int, x: Tensor, wanted: Operand, sizes: Sizes) -> Tensor:
    like = wanted.node.meta["val"]
    return restrided(arrange(x, result_dims(region, k), wanted.dims, sizes).to(like.dtype), like)


class CaughtProgram:
    """What a replacement gets for a program: a function of a tensor in the axes of the pattern's argument.

    ``captured``: the tensors it reads.  ``str()`` shows it as algebra.
    """

    def __init__(self, region: Region, name: str, captured: Mapping[str, Tensor], sizes: Sizes) -> None:
        self._region, self._name, self._sizes = region, name, sizes
        self.captured = captured

    def __call__(self, x: Tensor) -> Tensor:
        """The program's value at ``x``, in the axes and the type of ``x``."""
        body = self._region.programs[self._name]
        dims = self._dims()
        order = [a for d in dims for a in d]
        world = RealWorld(order, self._sizes, {}, x.device, x.dtype)
        placed = {n: world.place(Operand(t.attr[0], t.attr[1]), self.captured[n]) for n, t in body.captures.items()}
        value = body.applied(world, world.spread(x, dims), placed)
        return world.gather(world.expanded(value, order), dims).to(x.dtype)

    def __str__(self) -> str:
        return str(self._region.programs[self._name])

    def _dims(self) -> Dims:
        return tuple(self._region.axes.dim(d) for d in self._region.pattern.program_dims[self._name])


def _gradient(region: Region, claim: Any, grads: Mapping[str, Tensor | None], sizes: Sizes) -> Tensor:
    made, settled = claim
    value, like = grads[made.name], settled.node.meta["val"]
    if value is None:
        raise Refused(f"the replacement has no gradient for {made.name}")
    dims: Dims = region.operand(made.name).dims if made.name in region.tensors else ()
    value = value.reshape(()) if not dims else value
    return restrided(arrange(value, dims, settled.dims, sizes).to(like.dtype), like)


def _number(term: Term, sizes: Sizes) -> Any:
    value = term.attr
    return sizes.number(value) if isinstance(value, sympy.Basic) else value


def _symbols(graph: Graph, region: Region) -> dict[sympy.Symbol, Node]:
    """Nodes that hold the symbols of the region's sizes and numbers, as far as they come before it."""
    exprs = [a.size for d in region.axes.dims.values() for a in d if isinstance(a.size, sympy.Basic)]
    exprs += [t.attr for t in region.scalars.values() if t.op == "number" and isinstance(t.attr, sympy.Basic)]
    wanted = {s for e in exprs for s in e.free_symbols}
    found: dict[sympy.Symbol, Node] = {}
    for node in graph.nodes if wanted else ():
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.expr in wanted:
            found.setdefault(value.node.expr, node)
        if node is region.roots[0].node or len(found) == len(wanted):
            break
    return found


# -- the replacement against the pattern ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Instance:
    """Where a replacement is compared: a type, a device, how sizes are made, whether gradients are compared.

    ``written``: the type in the graph.  What the pattern casts to is as good as that; a replacement may cast as far.
    """

    dtype: torch.dtype
    device: torch.device
    step: int
    grad: bool
    written: torch.dtype

    def tolerance(self, pattern: set[torch.dtype], replacement: set[torch.dtype]) -> float:
        """How far two results may be apart, where these are the types of what the two compute on the way."""
        own = TOLERANCE.get(self.written, 1e-4)
        usual = max(TOLERANCE.get(t, 1e-4) for t in {self.dtype, *pattern})
        return max([usual, *(n for t in replacement if (n := TOLERANCE.get(t, 1e-4)) <= own)])


_verified: dict[Any, str] = {}


def difference(pattern: Pattern, region: Region, training: bool) -> str:
    """Where the replacement differs from the pattern, in ``training`` in a gradient too; empty when they agree."""
    if pattern.trusted:
        return ""
    value = region.operand(next(iter(region.tensors))).node.meta["val"]
    scalars = tuple((n, t.attr if isinstance(t.attr, (int, float)) else None) for n, t in region.scalars.items())
    key = (pattern.key(), str(region.pattern.variant), scalars, value.dtype, str(value.device), training)
    if key not in _verified:
        own = _Instance(value.dtype, value.device, 16, training, value.dtype)
        exact = _Instance(torch.float64, torch.device("cpu"), 1, training, value.dtype)
        _verified[key] = _compared(pattern, region.pattern.variant, dict(scalars), (exact, own))
    return _verified[key]


def _compared(
    pattern: Pattern, variant: Variant, scalars: Mapping[str, float | None], instances: tuple[_Instance, ...]
) -> str:
    failed = ""
    for instance in instances:
        try:
            with clean_room():
                found = (_compare(pattern, variant, scalars, instance, seed) for seed in SEEDS)
                return next(filter(None, found), "")
        except Refused as refused:
            return str(refused)
        except Exception as error:  # an operator that does not run on such an instance says nothing about its values
            failed = failed or _told(error)
    return f"the replacement could not be compared with the pattern: {failed}; trusted=True skips this"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}{authors_line(error)}"


def _compare(
    pattern: Pattern, variant: Variant, scalars: Mapping[str, float | None], instance: _Instance, seed: int
) -> str:
    assert pattern.replacement is not None
    inputs = dict(small_inputs(variant, scalars, instance.dtype, instance.device, instance.step, seed, instance.grad))
    with _Types() as here:
        mine = _evaluated(pattern.function, {**variant.fixed, **inputs}, seed)
    with _Types() as there:
        theirs = _evaluated(pattern.replacement, {**variant.fixed, **inputs}, seed)
    tolerance = instance.tolerance(here.types, there.types)
    if len(mine) != len(theirs):
        return f"the replacement returns {len(theirs)} values with gradients, the pattern {len(mine)}"
    for (what, x), (_, y) in zip(mine, theirs, strict=True):
        if (x is None) != (y is None):
            return f"{what}: only the {'pattern' if y is None else 'replacement'} has one"
        if x is None or y is None:
            continue
        if x.shape != y.shape:
            return f"{what} has shape {tuple(y.shape)} in the replacement, {tuple(x.shape)} in the pattern"
        worst = _worst(x, y, tolerance)
        if worst is not None:
            gap, place = worst
            return f"{what} of the replacement differs from the pattern's by {gap:.3g} at {place}, on {_shapes(inputs)}"
    return ""


class _Types(TorchDispatchMode):
    """The floating types of all that is computed in the block: what casts to float32 is as good as float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.types |= {x.dtype for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()}
        return out


def _worst(x: Tensor, y: Tensor, tolerance: float) -> tuple[float, list[int]] | None:
    """The largest difference beyond rounding, and where."""
    a, b = x.to(torch.float64), y.to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))
    size = torch.where(a.isfinite(), a, 0.0).abs().max() if a.numel() else torch.zeros(())
    if not gap.numel() or float(gap.max()) <= tolerance * (1.0 + float(size)):
        return None
    flat = int(gap.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), gap.shape)]
    return float(gap.max()), place


def _shapes(inputs: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{n} {tuple(x.shape)}" if isinstance(x, Tensor) and x.dim() else f"{n} {float(x):g}"
        for n, x in inputs.items()
        if not callable(x) or isinstance(x, Tensor)
    )


def _evaluated(function: Callable[..., Any], inputs: Mapping[str, Any], seed: int) -> list[tuple[str, Tensor | None]]:
    """The results of ``function`` and the gradients of its inputs, on copies."""
    own = {
        n: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for n, x in inputs.items()
    }
    with torch.enable_grad():
        out = pytree.tree_leaves(function(**own))
    for k, x in enumerate(out):
        if not isinstance(x, Tensor):  # the pattern's results are: its trace has shown it
            raise Refused(f"result {k} of the replacement is a {type(x).__name__}, not a tensor")
    values: list[tuple[str, Tensor | None]] = [(f"result {k}", x.detach()) for k, x in enumerate(out)]
    wanted = {n: x for n, x in own.items() if isinstance(x, Tensor) and x.requires_grad}
    random = torch.Generator().manual_seed(seed + 99)
    roots = [x for x in out if x.requires_grad]
    seeds = [torch.randn(x.shape, generator=random).to(x.dtype).to(x.device) for x in out]
    if roots and wanted:
        given = [s for s, x in zip(seeds, out, strict=True) if x.requires_grad]
        found = torch.autograd.grad(roots, list(wanted.values()), given, allow_unused=True)
        values += [(f"the gradient of {n}", g) for n, g in zip(wanted, found, strict=True)]
    return values


def small_inputs(
    variant: Variant,
    scalars: Mapping[str, float | None],
    dtype: torch.dtype,
    device: torch.device,
    step: int = 1,
    seed: int = 0,
    grad: bool = True,
    first: int = 0,
) -> Iterator[tuple[str, Any]]:
    """Random arguments for a pattern: axes of a few positions (times ``step``), the first one of ``first``."""
    random = torch.Generator().manual_seed(seed)
    names = dict.fromkeys(a for p in variant.parameters for a in p.axes if isinstance(a, str))
    sizes = {a: step * AXIS_SIZES[(k + seed) % len(AXIS_SIZES)] for k, a in enumerate(names)}
    sizes |= dict.fromkeys(list(names)[:1], first) if first else {}
    for p in variant.parameters:
        yield p.name, _small(p, sizes, scalars, dtype, device, random, grad)


def _small(
    p: Parameter,
    sizes: Mapping[str, int],
    scalars: Mapping[str, float | None],
    dtype: torch.dtype,
    device: torch.device,
    random: torch.Generator,
    grad: bool,
) -> Any:
    if p.kind == "program":
        return lambda x: 0.8 * x + 0.1 * torch.tanh(x)
    if p.kind == "scalar":
        known = scalars.get(p.name, 0.5)
        return torch.rand((), generator=random, dtype=torch.float64).to(dtype).to(device) if known is None else known
    shape = [sizes[a] if isinstance(a, str) else a for a in p.axes]
    if p.dtype == torch.bool:
        return (torch.rand(shape, generator=random) < 0.7).to(device)
    if p.dtype is not None and not p.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=random, dtype=p.dtype).to(device)
    return torch.randn(shape, generator=random).to(p.dtype or dtype).to(device).requires_grad_(grad)
