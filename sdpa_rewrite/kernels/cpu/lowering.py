"""Inductor's lowerings of the fused attention operators on CPU: a kernel whose C++ is written when it is due."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import config, ir, lowering
from torch._inductor.virtualized import V

from sdpa_rewrite import processor
from sdpa_rewrite.kernels.cpu.inline import CPU, TILE
from sdpa_rewrite.kernels.cpu.source import NAME, STEP, Memory, Writer, headers
from sdpa_rewrite.kernels.op import attention, attention_backward
from sdpa_rewrite.kernels.spec import Spec

log = logging.getLogger("sdpa_rewrite")


def register() -> None:
    """Tell Inductor what to make of the operators."""
    if attention not in lowering.lowerings:
        lowering.register_lowering(attention, type_promotion_kind=None)(_forward)
        lowering.register_lowering(attention_backward, type_promotion_kind=None)(_backward)


def _forward(query: Any, key: Any, value: Any, captures: Any, numbers: Any, spec: str) -> Any:
    if not _can_inline(spec):
        return _fallback(attention, query, key, value, captures, numbers, spec)
    return _kernel([query, key, value, *captures], len(captures), numbers, spec, False)


def _backward(*args: Any) -> Any:
    if not _can_inline(args[5]):
        return _fallback(attention_backward, *args)
    query, key, value, captures, numbers, spec, out, maximum, total, grad, grad_total = args
    rest = [out, maximum, total, grad] + ([grad_total] if grad_total is not None else [])
    return _kernel([query, key, value, *captures, *rest], len(captures), numbers, spec, True)


def _can_inline(spec: str) -> bool:
    """Whether Inductor makes loops of all programs; where it does not, the operator runs as in eager."""
    try:
        with V.graph.set_current_device(CPU):
            Writer.check(Spec.of(spec))
    except Exception as error:
        log.warning("a program of a fused attention cannot be inlined, it runs unfused: %s", error)
        return False
    return True


def _fallback(operator: Any, *args: Any) -> Any:
    return lowering.fallback_handler(operator, add_to_fallback_set=False)(*args)


def _kernel(inputs: list[Any], captures: int, numbers: Any, spec: str, backward: bool) -> Any:
    realized = [ir.ExternKernel.realize_input(x) for x in inputs]
    for x in realized:
        if isinstance(x.get_layout(), ir.FlexibleLayout):
            x.freeze_layout_with_same_order(x.get_stride())
    outputs = [_empty(x) for x in V.graph.current_node.meta["val"]]
    FusedAttention(realized, outputs, captures, [sympy.sympify(_expr(n)) for n in numbers], spec, backward)
    return tuple(outputs)


def _expr(n: Any) -> Any:
    return n.node.expr if isinstance(n, torch.SymInt) else n


def _empty(like: torch.Tensor) -> Any:
    box = lowering.empty_strided(
        [_expr(n) for n in like.shape], [_expr(n) for n in like.stride()], dtype=like.dtype, device=like.device
    )
    box.realize()
    return box


class FusedAttention(ir.ExternKernel):
    """A call of a kernel of ours, which writes into ``outputs``."""

    def __init__(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        captures: int,
        numbers: Sequence[sympy.Expr],
        spec: str,
        backward: bool,
    ) -> None:
        self.results: list[Any] = [ir.ExternKernel.unwrap_storage([x])[0] for x in outputs]
        super().__init__(None, ir.NoneLayout(device=CPU), [*inputs, *self.results])
        self.count, self.captures, self.numbers = len(inputs), captures, tuple(numbers)
        self.spec, self.backward = Spec.of(spec), backward
        self.mutation_outputs = [ir.MutationOutput(ir.NoneLayout(device=CPU), x, self) for x in self.results]
        V.graph.register_operation(self)

    def get_outputs(self) -> list[Any]:
        """The buffers that are written."""
        return list(self.mutation_outputs)

    def has_side_effects(self) -> bool:
        """None but on the outputs."""
        return False

    def get_unbacked_symbol_defs(self) -> Any:
        """None."""
        from torch.utils._ordered_set import OrderedSet

        return OrderedSet()

    def get_free_symbol_uses(self, unbacked_only: bool = False) -> Any:
        """Those of sizes, strides and numbers."""
        found = super().get_free_symbol_uses(unbacked_only)
        for n in self.numbers:
            found |= ir.get_free_symbols(n, unbacked_only)
        return found

    def codegen(self, wrapper: Any) -> None:
        """Define the kernel, unless an equal one is defined, and call it."""
        source, arguments = self._source()
        types = [kind for kind, _ in arguments]
        name = _defined(wrapper, source, types)
        self.codegen_comment(wrapper)
        for _, x in arguments:
            if isinstance(x, sympy.Symbol):
                wrapper.ensure_size_computed(x)
        call = [x.codegen_reference() if isinstance(x, ir.IRNode) else str(x) for _, x in arguments]
        wrapper.generate_kernel_call(name, call, device=CPU, triton=False, arg_types=types)

    def _source(self) -> tuple[str, list[tuple[str, Any]]]:
        tensors = self.inputs[: self.count]
        memories = [_memory(x) for x in tensors]
        outs = [_memory(x) for x in self.results]
        spec, given = self.spec, memories[3 : 3 + self.captures]
        axes = self.numbers[: sum(spec.split)]
        writer = Writer(spec, axes, self.numbers, given)
        body = _Body(writer, memories, outs, self.captures, self.backward)
        text = body.write()
        arguments: list[tuple[str, Any]] = [(f"const {m.scalar}*", x) for m, x in zip(memories, tensors, strict=True)]
        arguments += [(f"{m.scalar}*", x) for m, x in zip(outs, self.results, strict=True)]
        arguments += [("const int64_t", symbol) for symbol in writer.symbols]
        return text, arguments


def _memory(x: Any) -> Memory:
    return Memory(x.get_dtype(), x.get_size(), x.get_stride())


def _defined(wrapper: Any, source: str, types: list[str]) -> str:
    """The name of the kernel of ``source`` in the code that Inductor writes."""
    known = wrapper.src_to_kernel
    if source in known:
        return str(known[source])
    name = f"cpp_fused_attention_{wrapper.next_kernel_suffix()}"
    known[source] = name
    text = source.replace(f"{NAME}(", f"{name if V.graph.cpp_wrapper else 'kernel'}(").replace(NAME, name)
    if not V.graph.cpp_wrapper:
        text = f"async_compile.cpp_pybinding({types!r}, r'''\n{text}\n''')"
    # ahead of time the wrapper gets the declaration, and the rest a file that is optimised as kernels are
    begin = source.rfind('extern "C"')
    declaration = source[begin : source.index(")", begin) + 1].replace(NAME, name) + ";\n"
    wrapper.define_kernel(name, text, gpu=False, cpp_definition=declaration)
    return name


class _Body:
    """The function that a kernel is."""

    def __init__(
        self, writer: Writer, memories: list[Memory], outs: list[Memory], captures: int, backward: bool
    ) -> None:
        self.writer, self.memories, self.outs, self.captures = writer, memories, outs, captures
        self.is_backward = backward

    def write(self) -> str:
        """The whole source."""
        program, start = self.writer.program(self.is_backward)
        threads = config.cpp.threads if config.cpp.threads > 0 else "omp_get_max_threads()"
        call = self._backward() if self.is_backward else self._forward()
        names = self._input_names()
        arguments = [f"const {m.scalar}* {n}" for m, n in zip(self.memories, names, strict=True)]
        arguments += [f"{m.scalar}* {n}" for m, n in zip(self.outs, self._output_names(), strict=True)]
        arguments += [f"const int64_t {n}" for n in self.writer.symbols.values()]
        return f"""#include <torch/csrc/inductor/cpp_prefix.h>
#include <numeric>
#define SDPA_REWRITE_{processor.pairs().upper()}
{headers()}
namespace sdpa_rewrite {{
{program}
}} // namespace sdpa_rewrite

extern "C" void {NAME}({", ".join(arguments)})
{{
  using namespace sdpa_rewrite;
  static_assert(TILE == {TILE} && STEP == {STEP});
  const int threads = {threads};
{call[0]}
{start}
{call[1]}
}}
"""

    def _input_names(self) -> list[str]:
        names = ["query", "key", "value", *(f"capture_{k}" for k in range(self.captures))]
        rest = ["out", "maximum", "total", "grad", "grad_total"]
        return names + rest[: len(self.memories) - len(names)]

    def _output_names(self) -> list[str]:
        if not self.is_backward:
            return ["out", "maximum", "total"]
        return ["grad_query", "grad_key", "grad_value", *(f"grad_{n}" for n in range(len(self.outs) - 3))]

    def _operand(self, memory: Memory, name: str, const: bool = True) -> str:
        strides = list(memory.strides)
        if len(strides) == 4:  # key or value: no group
            strides.insert(2, 0)
        listed = ", ".join(self.writer.number(s) for s in strides)
        return f"Operand<{'const ' if const else ''}{memory.scalar}>{{{name}, {listed}}}"

    def _sizes(self) -> str:
        query, _, value = self.memories[:3]
        columns = value.sizes[2]
        sizes = [*query.sizes[:4], columns, query.sizes[4], value.sizes[3]]
        return f"  const Sizes size{{{', '.join(self.writer.number(n) for n in sizes)}}};"

    def _flags(self) -> str:
        spec = self.writer.spec
        return f"{spec.scale!r}f, {'true' if spec.safe else 'false'}, threads"

    def _forward(self) -> tuple[str, str]:
        query, key, value = self.memories[:3]
        operands = [self._operand(m, n) for m, n in zip((query, key, value), ("query", "key", "value"), strict=True)]
        out = self._operand(self.outs[0], "out", const=False)
        kind = f"Forward<{query.scalar}, {self.outs[0].scalar}>"
        call = f"  {kind} call{{size, {', '.join(operands)}, {out}, maximum, total, {self._flags()}}};\n"
        return self._sizes(), call + "  forward(call, program);"

    def _backward(self) -> tuple[str, str]:
        memories, names = self.memories, self._input_names()
        at = dict(zip(names, memories, strict=True))
        operands = [self._operand(at[n], n) for n in ("query", "key", "value", "out", "grad")]
        grads = [self._operand(m, n, const=False) for m, n in zip(self.outs[:3], self._output_names(), strict=False)]
        kind = f"Backward<{at['query'].scalar}, {at['out'].scalar}>"
        total = "grad_total" if "grad_total" in at else "nullptr"
        given = f"{', '.join(operands)}, maximum, total, {total}, {', '.join(grads)}, {self._flags()}"
        return self._sizes(), f"  {kind} call{{size, {given}}};\n  backward(call, program);"
