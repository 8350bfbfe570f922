"""A pattern as readable algebra."""

from __future__ import annotations

from collections.abc import Iterable

from sdpa_rewrite.algebra.axes import Atom, Dim
from sdpa_rewrite.algebra.term import Term
from sdpa_rewrite.authoring import registry
from sdpa_rewrite.authoring.hole import is_program, program_name
from sdpa_rewrite.authoring.lifted import LiftedPattern, lifted_variants
from sdpa_rewrite.authoring.opener import Opener
from sdpa_rewrite.authoring.pattern import Pattern
from sdpa_rewrite.authoring.region import Near
from sdpa_rewrite.authoring.unify import kind_of
from sdpa_rewrite.lift.ops import source_line

LONGEST = 400


def describe(pattern: Pattern | str | None = None) -> str:
    """A registered pattern (all of them, without one) as text: its parameters, and each result as algebra.

    ``sum_j(softmax_j(sum_d(q[b h i d] * k[b h j d]) * scale) * v[b h j e])``.  Raises ``KeyError`` for a name that
    is not registered.
    """
    if pattern is None:
        return "\n\n".join(describe(p) for p in registry.active())
    known = pattern if isinstance(pattern, Pattern) else registry.named(pattern)
    lines = [f"{known.name}: {known.summary}".removesuffix(": "), *(f"  {p}" for p in known.parameters)]
    for lifted in lifted_variants(known):
        when = f" when {lifted.variant}" if lifted.variant.fixed else ""
        lines += [f"  = {_Text(lifted).of(root)}{when}" for root in lifted.roots]
    if known.replacement is None and not known.names_sites:
        lines.append(f"  not replaced: {known.why_not or 'it has no replacement'}")
    return "\n".join(lines)


def diagnosis(near: Near) -> str:
    """A near miss in words: the pattern, how much of it was found, what it has and what the graph has instead.

    With the lines of both: ``gated (45% of it found): softmax: expected softmax_j(...), got div: no softmax (model.py:9
    in f: ...; in the pattern: gated.py:12 in gated: ...)``.
    """
    text = near.text
    if near.expected is not None and near.got is not None:
        words = _Text(near.pattern)
        text = f"{words.role(near.expected)}: expected {words.of(near.expected)}, got {_got(near.got)}: {text}"
    there, here = _lines(map(source_line, near.there)), _lines(map(near.pattern.line, near.here))
    places = "; ".join(filter(None, [there, here and f"in the pattern: {here}"]))
    return f"{near.pattern.name} ({near.matched:.0%} of it found): {text}" + (f" ({places})" if places else "")


def _lines(lines: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(filter(None, lines)))


def _got(term: Term) -> str:
    if term.op == "leaf":
        kind, name = kind_of(term), term.attr[0].name
        return name if name.startswith(kind) else f"{kind} {name}"
    return str(term.attr) if term.op == "number" else kind_of(term)


class _Text:
    """Terms of one pattern in words."""

    def __init__(self, lifted: LiftedPattern) -> None:
        self.opener: Opener = lifted.opener
        self.parameters = lifted.parameters
        self.names = {symbol: axis for axis, symbol in lifted.symbols.items()}

    def of(self, term: Term) -> str:
        """A term, cut where it is too long."""
        text = self._text(term, 0)
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."

    def role(self, term: Term) -> str:
        """What a term is for: the parameter that it is, or its operator."""
        known = self.parameters.get(term.attr[0]) if term.op == "leaf" else None
        if known is not None:
            return known.name
        return "softmax" if self.opener.softmax(term) is not None else kind_of(self.opener.open(term))

    def _axis(self, atom: Atom) -> str:
        return str(self.names.get(atom.size, atom.size))

    def _dim(self, dim: Dim) -> str:
        return "".join(self._axis(a) for a in dim) or "1"

    def _text(self, term: Term, depth: int) -> str:
        if term.op == "leaf" and term.attr[0] in self.parameters:
            parameter = self.parameters[term.attr[0]]
            axes = " ".join(map(self._dim, term.attr[1]))
            return f"{parameter.name}[{axes}]" if axes else parameter.name
        if term.op == "number":
            return f"{term.attr:g}" if isinstance(term.attr, float) else str(term.attr)
        soft = self.opener.softmax(term)
        if soft is not None:
            over = "".join(sorted(map(self._axis, soft.axes)))
            return f"{'safe_' if soft.safe else ''}softmax_{over}({self._text(soft.logits, depth + 1)})"
        top = self.opener.open(term)
        args = [self._text(a, depth + 1) for a in top.args]
        if is_program(top):
            return f"{program_name(top)}({args[0]})"
        if top.op == "reduce":
            product = self.opener.open(top.args[0])
            inner = " * ".join(self._text(a, depth + 1) for a in product.args) if product.op == "mul" else args[0]
            return f"{top.attr[0]}_{''.join(self._axis(a) for a in top.attr[1])}({inner})"
        if top.op == "index":
            return self._dim(top.attr[0])
        if top.op in ("mul", "add", "div", "le", "lt", "eq"):
            sign = {"mul": " * ", "add": " + ", "div": " / ", "le": " <= ", "lt": " < ", "eq": " == "}[top.op]
            text = sign.join(args)
            return text if depth == 0 or top.op == "mul" else f"({text})"
        return f"{kind_of(top)}({', '.join(args)})" if args else kind_of(top)
