"""The C++ of one call: its programs, what they read, and the call of the kernel that does the rest."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
from torch._inductor.codegen.cpp_utils import cexpr

from sdpa_rewrite.kernels import program
from sdpa_rewrite.kernels.cpu.inline import CTYPES, HELD, TILE, row_function
from sdpa_rewrite.kernels.spec import Input, Part, Spec, dtype_named

HEADERS = ("vector.h", "matmul.h", "forward.h", "backward.h", "program.h")
SCALARS = CTYPES | {torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half", torch.float64: "double"}
STEP = 48  # as in forward.h
POSITION = ("b", "h", "g", "i", "j")
NAME = "KERNEL_NAME"
"""Stands for the kernel's name in its source."""


@functools.cache
def headers() -> str:
    """The C++ that all kernels share."""
    return "".join(Path(__file__).with_name(name).read_text() for name in HEADERS)


@dataclass(frozen=True)
class Memory:
    """A tensor in memory: its type, sizes and strides."""

    dtype: torch.dtype
    sizes: Sequence[Any]
    strides: Sequence[Any]

    @property
    def scalar(self) -> str:
        """The type of an element in C++."""
        return SCALARS[self.dtype]


@dataclass
class Writer:
    """The source of a call; ``arguments`` and ``symbols`` are what the kernel must be given, in order."""

    spec: Spec
    axes: Sequence[Any]
    numbers: Sequence[Any]
    captures: Sequence[Memory]
    functions: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    symbols: dict[sympy.Symbol, str] = field(default_factory=dict)
    start: list[str] = field(default_factory=list)
    _filled: dict[int, int] = field(default_factory=dict)
    _scratch: int = 0

    def number(self, value: Any) -> str:
        """An integer: written out, or by the arguments that hold its symbols."""
        value = sympy.expand(sympy.sympify(value))
        if value.is_number:
            return f"int64_t({int(value)})"
        for symbol in sorted(value.free_symbols, key=str):
            self.symbols.setdefault(symbol, f"n_{symbol}")
        named = {s: sympy.Symbol(n, integer=True) for s, n in self.symbols.items()}
        return f"int64_t({cexpr(value.xreplace(named))})"

    # -- positions ---------------------------------------------------------------------------------------------

    def _offset(self, axes: Sequence[int], strides: Sequence[Any], groups: Iterable[int]) -> str:
        """Where along ``groups`` of dimensions a position lies: the sum of index times stride over the axes."""
        terms = []
        for group in groups:
            inside = list(self.spec.axes_of(group))
            for axis, stride in zip(axes, strides, strict=True):
                if axis in inside:
                    terms.append(f"{self._index(axis, inside, POSITION[group])} * {self.number(stride)}")
        return " + ".join(terms) or "0"

    def _index(self, axis: int, inside: list[int], position: str) -> str:
        below = 1
        for k in inside[inside.index(axis) + 1 :]:
            below = below * self.axes[k]
        out = position if below == 1 else f"({position} / {self.number(below)})"
        return out if axis == inside[0] else f"({out} % {self.number(self.axes[axis])})"

    def _strides(self, what: Input) -> list[Any]:
        if what.kind == "tensor":
            return [self.captures[what.at].strides[k] for k in what.axes]
        return self._row_major(what.axes)

    def _row_major(self, axes: Sequence[int]) -> list[Any]:
        strides: list[Any] = []
        step: Any = 1
        for axis in reversed(axes):
            strides.insert(0, step)
            step = step * self.axes[axis]
        return strides

    def _varies(self, what: Input, groups: Sequence[int]) -> bool:
        return any(self.spec.group_of(k) in groups for k in what.axes)

    def _is_flat(self, what: Input) -> bool:
        """Whether an input, which varies along the columns, is the same for all columns of a tile."""
        *_, last = self.spec.axes_of(4)
        size = self.axes[last]
        return last not in what.axes and isinstance(size, (int, sympy.Integer)) and size % TILE == 0

    def _column_stride(self, axes: Sequence[int], strides: Sequence[Any]) -> str:
        """Between neighbouring columns; 0 where that is no one number."""
        columns = list(self.spec.axes_of(4))
        inside = [s for k, s in zip(axes, strides, strict=True) if k in columns]
        whole = (
            bool(inside)
            and len(inside) == len(columns)
            and all(
                sympy.expand(s - t * self.axes[k]) == 0
                for s, t, k in zip(inside, inside[1:], columns[1:], strict=False)
            )
        )
        return self.number(inside[-1]) if whole else self.number(0)

    # -- what programs read ------------------------------------------------------------------------------------

    def _kind(self, input: int) -> tuple[torch.dtype, bool]:
        """The type that a program reads an input as, and whether it varies along a row."""
        what = self.spec.inputs[input]
        dtype = dtype_named(what.dtype)
        dtype = torch.float32 if dtype.is_floating_point else dtype
        return dtype, self._varies(what, (4,))

    def _fill(self, input: int) -> int:
        """The member function that lays an input of a tile out in scratch memory; returns where, in floats."""
        if input in self._filled:
            return self._filled[input]
        at = self._filled[input] = self._scratch
        dtype, wide = self._kind(input)
        dtype = HELD.get(dtype, dtype)
        self._scratch += STEP * (TILE if wide else 1) * max(dtype.itemsize, 4) // 4 + 16
        self._scratch = (self._scratch + 15) // 16 * 16
        what = self.spec.inputs[input]
        strides = self._strides(what)
        tall = self._varies(what, (2, 3))
        row = self._offset(what.axes, strides, (0, 1, 2, 3))
        column = self._offset(what.axes, strides, (4,))
        step = self._column_stride(what.axes, strides)
        read = self._read(input, wide, step)
        self.members.append(f"""
  int64_t column_{input}([[maybe_unused]] int64_t j) const {{ return {column}; }}
  void fill_{input}(const Tile& t, {CTYPES[dtype]}* to) const {{
    constexpr int64_t width = {TILE if wide else 1};
    for (int64_t r = 0; r < {"t.rows" if tall else 1}; ++r, to += width) {{
      [[maybe_unused]] const int64_t b = t.b, h = t.h, g = t.g(r), i = t.i(r);
      const int64_t row = {row};
{read}
    }}
  }}""")
        return at

    def _read(self, input: int, wide: bool, step: str) -> str:
        what = self.spec.inputs[input]
        source = f"capture_{what.at}"
        one = {"tensor": f"{source}[row + {{0}}]", "index": "row + {0}"}
        if what.kind == "uniform" and not self.captures[what.at].sizes:
            one["uniform"] = f"normalized_rand_cpu(uint32_t({source}[0]), uint32_t(row + {{0}}))"
            fast = f"uniform(to, uint32_t({source}[0]), uint32_t(row + column_{input}(t.column)), t.columns)"
        elif what.kind == "uniform":
            one["uniform"] = f"{source}[row + {{0}}]"
            fast = f"copy({source} + row + column_{input}(t.column), 1, to, t.columns)"
        else:
            fast = f"copy({source} + row + column_{input}(t.column), step, to, t.columns)"
        if not wide:
            return f"      *to = {one[what.kind].format(0)};"
        if self._is_flat(what):
            return f"      std::fill_n(to, t.wide(), {one[what.kind].format(f'column_{input}(t.column)')});"
        each = one[what.kind].format(f"column_{input}(t.column + c)")
        loop = f"for (int64_t c = 0; c < t.columns; ++c) to[c] = {each};"
        if what.kind == "index":
            body = f"      {loop}"
        else:
            good = "step != 0" if what.kind == "tensor" else "step == 1"
            body = f"      const int64_t step = {step};\n      if ({good}) {fast};\n      else {loop}"
        return f"{body}\n      for (int64_t c = t.columns; c < t.wide(); ++c) to[c] = 0;"

    def _arguments(self, part: Part) -> tuple[str, list[str]]:
        """Code that lays out the inputs of a program, and the pointers for row r."""
        lines, pointers = [], []
        for input in part.inputs:
            at = self._fill(input)
            dtype, wide = self._kind(input)
            tall = self._varies(self.spec.inputs[input], (2, 3))
            ctype = CTYPES[HELD.get(dtype, dtype)]
            lines.append(f"    auto* x{input} = reinterpret_cast<{ctype}*>(scratch + {at}); fill_{input}(t, x{input});")
            pointers.append(f"x{input}" + (f" + r * {TILE if wide else 1}" if tall else ""))
        return "\n".join(lines), pointers

    # -- programs ----------------------------------------------------------------------------------------------

    def _function(self, part: Part, name: str, scores: int) -> str:
        kinds = [(torch.float32, True)] * scores + [self._kind(k) for k in part.inputs]
        self.functions.append(row_function(f"{NAME}_{name}", program.read(part.program), kinds))
        return f"{NAME}_{name}"

    def _program(self, part: Part | None, name: str, method: str, target: str, scores: int) -> None:
        if part is None:
            self.members.append(f"  void {method}(float*, const Tile&, float*) const {{}}")
            return
        function = self._function(part, name, scores)
        lines, pointers = self._arguments(part)
        given = [f"{target} + r * TILE"] * scores + pointers + [f"{target} + r * TILE", "t.wide()"]
        self.members.append(f"""
  void {method}(float* {target}, const Tile& t, [[maybe_unused]] float* scratch) const {{
{lines}
    for (int64_t r = 0; r < t.rows; ++r) {function}({", ".join(given)});
  }}""")

    def _backward(self) -> None:
        spec = self.spec
        parts = {"mixed": spec.score_backward, "bare": spec.bare_backward}
        branches = []
        for kind, part in parts.items():
            if part is None:
                continue
            function = self._function(part, f"{kind}_backward", 2)
            lines, pointers = self._arguments(part)
            tiles = [f"gradient_{k}" for k in part.learned]
            for k in part.learned:
                lines += f"\n    float* gradient_{k} = scratch + {self._scratch};"
                self._scratch += STEP * TILE
            given = ["raw + r * TILE", "slope + r * TILE", *pointers, "slope + r * TILE"]
            given += [*(f"{tile} + r * TILE" for tile in tiles), "t.wide()"]
            sums = "\n".join(f"    collect_{k}(gradient_{k}, t, learned);" for k in part.learned)
            branches.append(f"""    if (kind == Block::{kind}) {{
{lines}
    for (int64_t r = 0; r < t.rows; ++r) {function}({", ".join(given)});
{sums}
    }}""")
        body = "\n".join(branches)
        self.members.append(f"""
  void backward([[maybe_unused]] const float* raw, [[maybe_unused]] float* slope, [[maybe_unused]] const Tile& t,
                [[maybe_unused]] Block kind, [[maybe_unused]] float* scratch, [[maybe_unused]] float* learned) const {{
{body}
  }}""")

    def _learned(self) -> None:
        """Where gradients of captures are summed: in their own memory, or by each thread apart."""
        own: list[str] = []
        reduced = []
        for n, input in enumerate(self.spec.learned):
            what = self.spec.inputs[input]
            strides = self._row_major(what.axes)
            size: Any = 1
            for axis in what.axes:
                size = size * self.axes[axis]
            count = self.number(size)
            alone = self._written_once(what)
            base = f"grad_{n}" if alone else " + ".join(["learned", *own])
            row = self._offset(what.axes, strides, (0, 1, 2, 3))
            column = self._offset(what.axes, strides, (4,))
            wide = "true" if self._varies(what, (4,)) else "false"
            self.members.append(f"""
  void collect_{input}(const float* tile, const Tile& t, [[maybe_unused]] float* learned) const {{
    [[maybe_unused]] const int64_t b = t.b, h = t.h;
    collect(tile, t, {base}, {wide}, {self._column_stride(what.axes, strides)},
            [&]([[maybe_unused]] int64_t g, [[maybe_unused]] int64_t i) -> int64_t {{ return {row}; }},
            [&]([[maybe_unused]] int64_t j) -> int64_t {{ return {column}; }});
  }}""")
            if alone:
                self.start.append(f"  std::fill_n(grad_{n}, {count}, 0.0f);")
                continue
            offset = " + ".join(["0", *own])
            reduced.append(f"""    for (int64_t x = 0; x < {count}; ++x) {{
      float sum = 0.0f;
      for (int thread = 0; thread < threads; ++thread) sum += all[thread * accumulators() + {offset} + x];
      grad_{n}[x] = sum;
    }}""")
            own.append(count)
        body = "\n".join(reduced)
        self.members.append(f"""
  int64_t accumulators() const {{ return {" + ".join(["0", *own])}; }}
  void reduce([[maybe_unused]] const float* all, [[maybe_unused]] int threads) const {{
{body}
  }}""")

    def _written_once(self, what: Input) -> bool:
        """Whether each cell of a gradient belongs to rows of one head, and so to one thread."""
        needed = [k for group in range(4) for k in self.spec.axes_of(group) if self.axes[k] != 1]
        return all(k in what.axes for k in needed)

    def _block(self) -> None:
        spec = self.spec
        known = spec.low is not None or spec.high is not None or spec.visible is not None
        if not known:
            start = "mixed" if spec.score is not None else "bare"
            self.members.append(f"  Block block(const Tile&) const {{ return Block::{start}; }}")
            return
        lines = ["    const Span s(t);", "    Block out = Block::bare;"]
        if spec.low is not None or spec.high is not None:
            bounds = ", ".join(
                f"{'true' if n is not None else 'false'}, {self.number(self.numbers[n]) if n is not None else 0}"
                for n in (spec.low, spec.high)
            )
            lines.append(f"    out = within_band(s, t, {bounds});")
        if spec.visible is not None:
            lines.append("    if (out != Block::hidden) out = both(out, table.of(s, t));")
        self.members.append("  Block block(const Tile& t) const {\n" + "\n".join(lines) + "\n    return out;\n  }")

    def _table(self) -> str:
        """Code that fills the table of hidden tiles."""
        part = self.spec.visible
        if part is None:
            return ""
        self._program(part, "visible", "visible", "out", 0)
        inputs = [self.spec.inputs[k] for k in part.inputs]
        varies = [any(self._varies(x, (group,)) for x in inputs) for group in range(4)]
        counts = ["size.batch", "size.heads", "size.group", "(size.rows + CELL - 1) / CELL"]
        names = ["batch", "heads", "group", "cells"]
        sizes = "\n".join(
            f"  program.table.{name} = {count if vary else 1};"
            for name, count, vary in zip(names, counts, varies, strict=True)
        )
        return f"""{sizes}
  program.table.tall = {"true" if varies[3] else "false"};
  program.table.fill(size, threads, program);
"""

    @staticmethod
    def check(spec: Spec) -> None:
        """Raise whatever stands in the way of inlining a program of ``spec``."""
        writer = Writer(spec, (), (), ())
        scored = (spec.score, spec.bare, spec.score_backward, spec.bare_backward)
        for part, scores in zip((*scored, spec.factor, spec.visible), (1, 1, 2, 2, 0, 0), strict=True):
            if part is not None:
                writer._function(part, "check", scores)

    def program(self, backward: bool) -> tuple[str, str]:
        """The struct, and code that prepares one named ``program``."""
        spec = self.spec
        flags = {
            "has_score": spec.score is not None,
            "has_bare": spec.bare is not None,
            "has_factor": spec.factor is not None,
            "sums_rows": any(not self._varies(spec.inputs[k], (4,)) for k in spec.learned),
        }
        self._program(spec.score, "score", "score", "tile", 1)
        self._program(spec.bare, "bare", "bare", "tile", 1)
        self._program(spec.factor, "factor", "factor", "out", 0)
        if backward:
            self._backward()
            self._learned()
        self._block()
        table = self._table()
        constants = "\n".join(f"  static constexpr bool {k} = {'true' if v else 'false'};" for k, v in flags.items())
        floor = "-INFINITE" if spec.floor == float("-inf") else f"{spec.floor!r}f"
        fields = [f"  const {c.scalar}* capture_{k};" for k, c in enumerate(self.captures)]
        fields += [f"  float* grad_{n};" for n in range(len(spec.learned))] if backward else []
        members = "\n".join(self.members)
        fields += [f"  int64_t {name};" for name in self.symbols.values()]
        fields += ["  Table table{};"]
        joined = "\n".join(fields)
        text = f"""{"".join(self.functions)}
struct {NAME}_Program {{
  using Program = {NAME}_Program;
{joined}
{constants}
  static constexpr float floor = {floor};
  int64_t scratch() const {{ return {self._scratch}; }}
{members}
}};
"""
        given = [f"capture_{k}" for k in range(len(self.captures))]
        given += [f"grad_{n}" for n in range(len(spec.learned))] if backward else []
        given += list(self.symbols.values())
        zero = "\n".join(self.start)
        start = f"  {NAME}_Program program{{{', '.join(given)}}};\n{table}{zero}\n"
        return text, start
