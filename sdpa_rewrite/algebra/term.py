"""Terms: what a node computes, written over named axes and free of layout.

Terms are hash-consed: two terms built by one ``Terms`` table are equal exactly when they are the same
object.  The vocabulary is small on purpose: a contraction is a ``sum`` of a product, a subtraction an
addition of a product with -1, a division by a number a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from sdpa_rewrite.algebra.axes import Atom, Dim, Dims, Size, Window, atoms_of, same_size

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne", "and", "or"})


@dataclass(frozen=True, eq=False)
class Term:
    """One value.

    ``op`` and ``attr``, by kind: ``leaf`` (node, dims), ``number`` value, ``index`` (dim, start, step),
    ``reduce`` (kind, atoms), ``cat`` (atom, atom or None per piece), ``part`` (atom, piece, offset), ``hole`` name,
    ``apply`` (target, template) for any other pointwise operator, ``along`` (target, template, dims, inputs) for an
    operator that is neither pointwise nor a reduction but is evaluated whole, else the name of a pointwise operation
    on ``args``.
    ``axes``: the atoms the value depends on.  ``node``: the graph node that first asked for it, with ``dims``.
    """

    op: str
    args: tuple[Term, ...]
    attr: Any
    axes: frozenset[Atom]
    order: int
    node: Node | None = field(default=None)
    dims: Dims | None = field(default=None)

    def __repr__(self) -> str:
        return show(self)


def show(term: Term, depth: int = 12) -> str:
    """A term as text, cut off at ``depth``."""
    if depth == 0:
        return "..."
    inner = ", ".join(show(a, depth - 1) for a in term.args)
    if term.op == "leaf":
        node, dims = term.attr
        return f"{node.name}{[''.join(a.name for a in d) for d in dims]}"
    if term.op == "number":
        return str(term.attr)
    if term.op == "hole":
        return f"<{term.attr}>"
    if term.op == "index":
        return "index(" + ",".join(a.name for a in term.attr[0]) + ")"
    if term.op == "reduce":
        return f"{term.attr[0]}_{','.join(a.name for a in term.attr[1])}({inner})"
    if term.op in ("apply", "along"):
        return f"{term.attr[0]}({inner})"
    return f"{term.op}({inner})"


Number = Any  # bool, int, float or sympy.Expr


def _fold(name: str, values: list[Number]) -> Number | None:
    """The number that pointwise ``name`` makes of numbers, or None where it is not one we can name."""
    symbolic = any(isinstance(v, sympy.Basic) for v in values)
    table: Mapping[str, Callable[..., Any]] = {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "sqrt": sympy.sqrt if symbolic else math.sqrt,
        "pow": lambda a, b: a**b,
        "exp": sympy.exp if symbolic else math.exp,
        "log": sympy.log if symbolic else math.log,
    }
    if name not in table or any(isinstance(v, bool) for v in values):
        return None
    try:
        value = table[name](*values)
    except (ArithmeticError, ValueError):
        return None
    if isinstance(value, complex):
        return None
    return value


class Terms:
    """The table that makes terms, one per lifted neighbourhood."""

    def __init__(self) -> None:
        self._table: dict[Any, Term] = {}

    def _make(
        self, op: str, args: tuple[Term, ...] = (), attr: Any = None, axes: frozenset[Atom] | None = None
    ) -> Term:
        known = attr
        if op == "number":
            known = type(attr), str(attr) if isinstance(attr, float) else attr
        elif op == "hole":  # the same name over renamed axes is another hole
            known = attr, axes
        key = (op, tuple(id(a) for a in args), known)
        term = self._table.get(key)
        if term is None:
            if axes is None:
                axes = frozenset().union(*(a.axes for a in args)) if args else frozenset()
            term = Term(op, args, attr, axes, len(self._table))
            self._table[key] = term
        return term

    def leaf(self, node: Node, dims: Dims) -> Term:
        """A tensor of the graph, read along ``dims``."""
        return self._make("leaf", (), (node, dims), frozenset(atoms_of(dims)))

    def number(self, value: Number) -> Term:
        """A constant: a Python number, or an expression of symbols."""
        if isinstance(value, sympy.Integer):
            value = int(value)
        elif isinstance(value, sympy.Float):
            value = float(value)
        return self._make("number", (), value)

    def index(self, dim: Dim, start: Size = 0, step: Size = 1) -> Term:
        """The position along ``dim``: ``start + step * position``."""
        if len(dim) == 1 and isinstance(dim[0], Window):
            window = dim[0]
            return self.index((window.base,), start + step * window.offset, step)
        if not dim:
            return self.number(start)
        return self._make("index", (), (dim, start, step), frozenset(dim))

    def hole(self, name: str, axes: frozenset[Atom]) -> Term:
        """The place of a value that a program is given."""
        return self._make("hole", (), name, axes)

    def call(self, name: str, *args: Term) -> Term:
        """Pointwise ``name`` of ``args``, in normal form; concatenations are pulled out of it."""
        if any(a.op == "cat" for a in args):
            pulled = self._through_cat(lambda *a: self.call(name, *a), args)
            if pulled is not None:
                return pulled
        if all(a.op == "number" for a in args):
            value = _fold(name, [a.attr for a in args])
            if value is not None:
                return self.number(value)
        simple = self._identity(name, args)
        if simple is not None:
            return simple
        if name in COMMUTATIVE:
            args = tuple(sorted(args, key=lambda a: a.order))
        return self._make(name, args)

    def _identity(self, name: str, args: tuple[Term, ...]) -> Term | None:
        def is_number(term: Term, value: float) -> bool:
            return term.op == "number" and not isinstance(term.attr, bool) and term.attr == value

        if name == "neg":  # -x -> -1 * x
            return self.call("mul", args[0], self.number(-1))
        if name == "sub":  # x - y -> x + -1 * y
            return self.call("add", args[0], self.call("neg", args[1]))
        if name == "div" and args[1].op == "number" and args[1].attr != 0:  # x / c -> x * (1 / c)
            if is_number(args[1], 1):
                return args[0]
            value = args[1].attr
            inverse = 1 / value if isinstance(value, sympy.Basic) else 1.0 / value
            return self.call("mul", args[0], self.number(inverse))
        if name == "mul":
            for x, y in (args, args[::-1]):
                if is_number(y, 1) and not (x.op == "number" and isinstance(x.attr, bool)):  # x * 1 -> x
                    return x
                if y.op == "number" and x.op == "mul" and any(a.op == "number" for a in x.args):
                    first, second = x.args if x.args[1].op == "number" else x.args[::-1]  # (x * c) * d -> x * (c * d)
                    folded = self.call("mul", second, y)
                    if folded.op == "number":
                        return self.call("mul", first, folded)
        if name == "add":
            for x, y in (args, args[::-1]):
                if is_number(y, 0):  # x + 0 -> x
                    return x
        if name == "where" and args[1] is args[2]:  # where(c, x, x) -> x
            return args[1]
        if name == "where" and args[0].op == "number":
            return args[1] if args[0].attr else args[2]
        if name in ("eq", "ne"):
            for x, y in (args, args[::-1]):
                if y.op == "number" and y.attr in (math.inf, -math.inf) and _is_share(x):  # e / sum(e) == inf -> False
                    return self.number(name == "ne")
        if name == "not" and args[0].op == "not":
            return args[0].args[0]
        return None

    def apply(self, target: Any, template: Any, *args: Term) -> Term:
        """Any other pointwise operator: ``template`` is its argument tuple with ``Slot`` where a term goes."""
        if any(a.op == "cat" for a in args):
            pulled = self._through_cat(lambda *a: self.apply(target, template, *a), args)
            if pulled is not None:
                return pulled
        return self._make("apply", args, (target, template))

    def along(self, target: Any, template: Any, dims: Dims, inputs: tuple[Dims, ...], args: tuple[Term, ...]) -> Term:
        """An operator evaluated whole: its arguments laid out as ``inputs``, its result as ``dims``."""
        return self._make("along", args, (target, template, dims, inputs), frozenset(atoms_of(dims)))

    def reduce(self, kind: str, term: Term, atoms: Dim) -> Term:
        """``kind`` over ``atoms``; a reduction of a concatenation is made of those of its pieces."""
        atoms = tuple(sorted((a for a in atoms), key=lambda a: a.name))
        if not atoms:
            return term
        if term.op == "cat":
            joined, pieces = term.attr
            if joined not in atoms:
                return self.cat(joined, pieces, tuple(self.reduce(kind, t, atoms) for t in term.args))
            rest = tuple(a for a in atoms if a is not joined)
            parts = [self.reduce(kind, t, (*rest, p) if p else rest) for t, p in zip(term.args, pieces, strict=True)]
            join = {"sum": "add", "amax": "maximum", "amin": "minimum", "any": "or", "all": "and"}[kind]
            total = parts[0]
            for part in parts[1:]:
                total = self.call(join, total, part)
            return total
        return self._make("reduce", (term,), (kind, atoms), term.axes - frozenset(atoms))

    def cat(self, atom: Atom, pieces: tuple[Atom | None, ...], args: tuple[Term, ...]) -> Term:
        """The concatenation of ``args`` along ``atom``; each runs along its piece (None: one position)."""
        inner = frozenset(p for p in pieces if p is not None)
        axes = frozenset().union(*(a.axes for a in args)) - inner | {atom}
        return self._make("cat", args, (atom, pieces), axes)

    def part(self, term: Term, whole: Atom, piece: Atom | None, offset: Size) -> Term:
        """``term`` along the positions of ``whole`` from ``offset`` on, counted by ``piece`` (None: one position)."""
        inner = frozenset((piece,) if piece is not None else ())
        return self._make("part", (term,), (whole, piece, offset), term.axes - {whole} | inner)

    def _through_cat(self, build: Callable[..., Term], args: tuple[Term, ...]) -> Term | None:
        """f(cat(a, b), c) -> cat(f(a, c), f(b, c)), where c does not vary along the joined axis."""
        first = next(a for a in args if a.op == "cat")
        atom, pieces = first.attr
        columns: list[tuple[Term, ...]] = []
        for arg in args:
            if arg.op == "cat" and arg.attr[0] is atom and _same_pieces(arg.attr[1], pieces):
                renames = ({o: n} if o and n and o is not n else {} for o, n in zip(arg.attr[1], pieces, strict=True))
                columns.append(tuple(self.rename(t, r) for t, r in zip(arg.args, renames, strict=True)))
            elif atom not in arg.axes:
                columns.append((arg,) * len(pieces))
            else:
                return None
        return self.cat(atom, pieces, tuple(build(*row) for row in zip(*columns, strict=True)))

    def rename(self, term: Term, mapping: Mapping[Atom, Atom]) -> Term:
        """``term`` with free and bound axes renamed."""
        if not mapping:
            return term
        return self._rebuild(term, {}, mapping)

    def substitute(self, term: Term, mapping: Mapping[Term, Term]) -> Term:
        """``term`` with subterms replaced."""
        return self._rebuild(term, dict(mapping), {})

    def _rebuild(self, term: Term, memo: dict[Term, Term], axes: Mapping[Atom, Atom]) -> Term:
        done = memo.get(term)
        if done is not None:
            return done
        args = tuple(self._rebuild(a, memo, axes) for a in term.args)
        attr = _rename_attr(term, axes) if axes else term.attr
        if term.op == "leaf":
            out = self.leaf(*attr)
        elif term.op == "index":
            out = self.index(*attr)
        elif term.op == "hole":
            out = self.hole(attr, frozenset(axes.get(a, a) for a in term.axes))
        elif term.op == "reduce":
            out = self.reduce(attr[0], args[0], attr[1])
        elif term.op == "cat":
            out = self.cat(attr[0], attr[1], args)
        elif term.op == "apply":
            out = self.apply(*attr, *args)
        elif term.op == "along":
            target, template, dims, inputs = attr
            out = self.along(target, template, dims, inputs, args)
        elif term.op == "part":
            out = self.part(args[0], *attr)
        elif term.op == "number":
            out = term
        else:
            out = self.call(term.op, *args)
        memo[term] = out
        return out


def _rename_attr(term: Term, axes: Mapping[Atom, Atom]) -> Any:
    def dims(value: Dims) -> Dims:
        return tuple(tuple(axes.get(a, a) for a in d) for d in value)

    if term.op == "leaf":
        return term.attr[0], dims(term.attr[1])
    if term.op == "index":
        return dims((term.attr[0],))[0], *term.attr[1:]
    if term.op == "reduce":
        return term.attr[0], dims((term.attr[1],))[0]
    if term.op == "cat":
        atom, pieces = term.attr
        return axes.get(atom, atom), tuple(axes.get(p, p) if p else None for p in pieces)
    if term.op == "part":
        whole, piece, offset = term.attr
        return axes.get(whole, whole), axes.get(piece, piece) if piece else None, offset
    if term.op == "along":
        target, template, out, inputs = term.attr
        return target, template, dims(out), tuple(dims(i) for i in inputs)
    return term.attr


def _same_pieces(a: tuple[Atom | None, ...], b: tuple[Atom | None, ...]) -> bool:
    return len(a) == len(b) and all(
        x is y or (x is not None and y is not None and same_size(x.size, y.size)) for x, y in zip(a, b, strict=True)
    )


@dataclass(frozen=True)
class Slot:
    """The place of the ``position``-th term in an operator's argument template."""

    position: int


def subterms(term: Term) -> Iterator[Term]:
    """Every subterm once, ``term`` first."""
    seen, stack = {term}, [term]
    while stack:
        top = stack.pop()
        yield top
        for arg in top.args:
            if arg not in seen:
                seen.add(arg)
                stack.append(arg)


def contains(term: Term, wanted: Term) -> bool:
    """Whether ``wanted`` is a subterm of ``term``."""
    return any(t is wanted for t in subterms(term))


def summands(terms: Terms, term: Term) -> list[Term]:
    """The addends of ``term``.  Only sums that involve a reduction are taken apart.

    A mask such as ``(1 - m) * -3.4e38`` stays whole: adding its parts in another order would cancel the scores.
    """
    if not any(t.op in ("reduce", "along") for t in subterms(term)):
        return [term]
    if term.op == "add":
        return [t for a in term.args for t in summands(terms, a)]
    if term.op == "mul":
        for x, y in (term.args, term.args[::-1]):
            if y.op == "number" and x.op == "add":
                return [terms.call("mul", t, y) for t in summands(terms, x)]
    return [term]


def _is_share(term: Term) -> bool:
    """exp(x) / (sum(exp(x)) + other exponentials), or its absolute value: between 0 and 1, or NaN."""
    if term.op == "apply" and term.attr[0] is torch.ops.aten.abs.default:
        return _is_share(term.args[0])
    if term.op != "div" or term.args[0].op != "exp":
        return False
    parts, stack = [], [term.args[1]]
    while stack:
        top = stack.pop()
        if top.op == "add":
            stack.extend(top.args)
        else:
            parts.append(top)
    summed = [p.args[0] if p.op == "reduce" and p.attr[0] == "sum" else p for p in parts]
    return term.args[0] in summed and all(p.op == "exp" for p in summed)


def dtype_of(node: Node) -> torch.dtype | None:
    """The type of a tensor node."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
