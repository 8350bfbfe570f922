"""Terms as the programs of the fused operator: graphs over one score, and what else they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from sdpa_rewrite.algebra.axes import Atom, Dim, size_of
from sdpa_rewrite.algebra.term import Term, subterms
from sdpa_rewrite.emit.base import Inputs
from sdpa_rewrite.emit.heads import Heads
from sdpa_rewrite.emit.scalars import constant, value_at
from sdpa_rewrite.kernels import program
from sdpa_rewrite.kernels.spec import Input, Part, name_of
from sdpa_rewrite.lift.ops import is_call, opname
from sdpa_rewrite.site import Capture, Site


@dataclass
class Programs:
    """Collects the programs of one call and what they read.

    ``axes`` are those of the scores in the operator's order; ``learned`` the captures that need a gradient.
    """

    site: Site
    heads: Heads
    given: Inputs
    dtype: torch.dtype
    learned: frozenset[str]
    inputs: list[Input] = field(default_factory=list)
    captures: list[Tensor] = field(default_factory=list)
    learned_inputs: list[int] = field(default_factory=list)
    _known: dict[Term, int] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[Dim, Dim, Dim, Dim, Dim]:
        """The axes of the five dimensions of the scores."""
        return self.heads.batch, self.heads.shared, self.heads.group, self.site.rows, self.site.columns

    @property
    def axes(self) -> list[Atom]:
        """All axes of the scores."""
        return [a for group in self.groups for a in group]

    def add(self, term: Term) -> Part:
        """A program without a score."""
        leaves = self._leaves(term)
        return self._part(leaves, lambda *values: self._value(term, self._given(leaves, values)))

    def add_of_score(self, term: Term) -> Part:
        """A program of the score."""
        leaves = self._leaves(term)
        return self._part(leaves, lambda *values: self._value(term, self._given((self._hole, *leaves), values)), 1)

    def add_backward(self, term: Term) -> Part:
        """The backward of a program of the score: from the score and the slope of its logit to its slopes."""
        leaves = self._leaves(term)
        learned = tuple(k for k, t in enumerate(leaves) if t.op == "hole" and t.attr in self.learned)

        def run(score: Tensor, slope: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                wanted = [score, *(values[k] for k in learned)]
                own = [x.detach().requires_grad_() for x in wanted]
                rest = list(values)
                for k, x in zip(learned, own[1:], strict=True):
                    rest[k] = x
                logit = self._value(term, self._given((self._hole, *leaves), (own[0], *rest)))
                if not logit.requires_grad:
                    return tuple(torch.zeros_like(x) for x in own)
                found = torch.autograd.grad(logit, own, slope, allow_unused=True)
            return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(own, found, strict=True))

        return self._part(leaves, run, 2, tuple(self._input(leaves[k]) for k in learned))

    def _given(self, leaves: Sequence[Term], values: Sequence[Tensor]) -> dict[Term, Tensor]:
        """Values by leaf; of random numbers, the comparison."""
        draws = {c.name: drawn(c) for c in self.site.captures}
        given = dict(zip(leaves, values, strict=True))
        return {t: d(x) if (d := draws.get(t.attr if t.op == "hole" else "")) else x for t, x in given.items()}

    @property
    def _hole(self) -> Term:
        return self.site.terms.hole("score", self.site.scores_axes)

    def _part(
        self, leaves: Sequence[Term], run: Callable[..., Any], scores: int = 0, learned: tuple[int, ...] = ()
    ) -> Part:
        numbers = tuple(self._input(t) for t in leaves)
        kinds = [self.dtype] * scores + [self._dtype_of(n) for n in numbers]
        return Part(program.written(_traced(run, kinds)), numbers, learned)

    def _dtype_of(self, input: int) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.inputs[input].dtype)
        return self.dtype if dtype.is_floating_point else dtype

    # -- what is read ------------------------------------------------------------------------------------------

    def _leaves(self, term: Term) -> list[Term]:
        """Holes of captures, indices, and symbolic numbers, in the order in which they are met."""
        found: dict[Term, None] = {}
        for t in subterms(term):
            if (t.op == "hole" and t is not self._hole) or _symbolic(t):
                found[t] = None
            elif t.op == "index":
                dim, start, step = t.attr
                found[self.site.terms.index(dim, 0, 1)] = None
                for n in (start, step):
                    if isinstance(size_of(n), sympy.Basic):
                        found[self.site.terms.number(size_of(n))] = None
        return list(found)

    def _input(self, leaf: Term) -> int:
        if leaf not in self._known:
            self._known[leaf] = len(self.inputs)
            self.inputs.append(self._described(leaf))
            if leaf.op == "hole" and leaf.attr in self.learned:
                self.learned_inputs.append(self._known[leaf])
        return self._known[leaf]

    def _described(self, leaf: Term) -> Input:
        if leaf.op == "index":
            return Input("index", self._places(leaf.attr[0]), dtype="int64")
        if leaf.op == "number":
            return self._number(leaf)
        capture = next(c for c in self.site.captures if c.name == leaf.attr)
        tensor, dims = self.given.tensors[capture.name]
        if drawn(capture) is not None and tensor.is_floating_point():
            self.captures.append(tensor)
            return Input("uniform", self._places(tuple(a for d in dims for a in d)), len(self.captures) - 1)
        self.captures.append(self.given.arranged(capture.name, [(a,) for a in self.axes], [False] * len(self.axes)))
        present = {a for d in dims for a in d}
        axes = tuple(k for k, a in enumerate(self.axes) if a in present)
        return Input("tensor", axes, len(self.captures) - 1, name_of(tensor.dtype))

    def _number(self, leaf: Term) -> Input:
        value = self.given.sizes.of(leaf.attr)
        dtype = torch.int64 if isinstance(value, (int, torch.SymInt)) else torch.float32
        device = self.given.tensors["query"][0].device
        self.captures.append(torch.full([1] * len(self.axes), value, dtype=dtype, device=device))
        return Input("tensor", (), len(self.captures) - 1, name_of(dtype))

    def _places(self, dim: Dim) -> tuple[int, ...]:
        axes = self.axes
        return tuple(axes.index(a) for a in dim)

    # -- values ------------------------------------------------------------------------------------------------

    def _value(self, term: Term, values: dict[Term, Tensor]) -> Tensor:
        """The value of ``term`` at one position, given those of what it reads."""
        return value_at(term, values, lambda leaf: self._leaf(leaf, values), self.dtype)

    def _leaf(self, term: Term, values: dict[Term, Tensor]) -> Tensor:
        if term.op == "number":
            return constant(term.attr, self.dtype, torch.device("cpu"))
        dim, start, step = term.attr
        out = values[self.site.terms.index(dim, 0, 1)]
        out = out if step == 1 else out * self._size(step, values)
        return out if start == 0 else out + self._size(start, values)

    def _size(self, size: Any, values: dict[Term, Tensor]) -> Any:
        size = size_of(size)
        return values[self.site.terms.number(size)] if isinstance(size, sympy.Basic) else size


@dataclass(frozen=True)
class Draw:
    """A comparison of fresh random numbers in [0, 1) with a number, as dropout draws its mask."""

    numbers: Node
    comparison: Any
    bound: float

    def __call__(self, x: Tensor) -> Tensor:
        """The comparison of ``x``; where that is its result already, ``x``."""
        if not x.is_floating_point():
            return x
        # half numbers are float32 ones, rounded
        out: Tensor = self.comparison(x.to(self.numbers.meta["val"].dtype), self.bound)
        return out


def drawn(capture: Capture) -> Draw | None:
    """How the values of a capture are drawn; None where they are not."""
    node = capture.operand.node
    if is_uniform(node):  # a site that was prepared; who reads the numbers tells the comparison
        node = next((user for user in node.users if _compares(user)), node)
    if not _compares(node) or not is_uniform(node.args[0]):
        return None
    others = (user for user in node.args[0].users if _compares(user))  # type: ignore[union-attr]
    if any((user.target, user.args[1]) != (node.target, node.args[1]) for user in others):
        return None  # the numbers alone would not tell which comparison is meant
    return Draw(node.args[0], node.target, float(node.args[1]))  # type: ignore[arg-type]


def _compares(node: Node) -> bool:
    return is_call(node) and opname(node) in ("gt", "ge", "lt", "le") and isinstance(node.args[1], (int, float))


def is_uniform(node: Any) -> bool:
    """Whether a node draws fresh random numbers in [0, 1)."""
    return is_call(node) and opname(node) in ("rand", "rand_like") and not node.kwargs.get("generator")


def _symbolic(term: Term) -> bool:
    return term.op == "number" and isinstance(term.attr, sympy.Basic) and not term.attr.is_number


def _traced(run: Callable[..., Any], kinds: Sequence[torch.dtype]) -> GraphModule:
    """``run`` as a graph of pointwise operators that Inductor has lowerings for."""
    from torch._inductor.decomposition import select_decomp_table

    with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch.no_grad():
        examples = [torch.zeros((), dtype=kind) for kind in kinds]
        module = make_fx(run, dict(select_decomp_table()), tracing_mode="real")(*examples)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module
