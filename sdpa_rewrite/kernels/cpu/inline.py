"""A program as a C++ function over a row of a tile, made by Inductor as it makes its own vectorised loops."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import ir, lowering
from torch._inductor.codegen.cpp import CppKernelProxy, KernelGroup, ParallelDepth
from torch._inductor.loop_body import LoopBody
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.utils import sympy_index_symbol_with_prefix
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.utils._sympy.symbol import SymT

TILE = 64
CTYPES = {
    torch.float32: "float",
    torch.bool: "bool",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
}
HELD = {torch.bool: torch.float32}
CPU = torch.device("cpu")
_patching = threading.Lock()  # classes of Inductor, which other threads may compile with


def row_function(name: str, module: GraphModule, inputs: Sequence[tuple[torch.dtype, bool]]) -> str:
    """``void name(const T0* in0, ..., float* out0, ..., int64_t wide)`` over the first ``wide`` of TILE positions.

    ``inputs`` are the type of each input, and whether it varies along the row; else a single value is read.  Truth
    values come as floats, 0 or 1: Inductor loads masks one by one.
    """
    names = [f"sdpa_rewrite_in{k}" for k in range(len(inputs))]
    held = [HELD.get(dtype, dtype) for dtype, _ in inputs]
    sizes = [TILE if wide else 1 for _, wide in inputs]
    boxes = [_placeholder(*given) for given in zip(names, (dtype for dtype, _ in inputs), sizes, strict=True)]
    results = [_loader(x) for x in _lowered(module, boxes)]
    outs = [f"sdpa_rewrite_buf{k}" for k in range(len(results))]
    dtypes = {**dict(zip(names, held, strict=True)), **dict.fromkeys(outs, torch.float32)}
    with _patching:
        body = _loops(results, names, outs, dtypes)
    arguments = [f"const {CTYPES[d]}* in{k}" for k, d in enumerate(held)]
    arguments += [f"float* out{k}" for k in range(len(outs))]
    arguments.append("[[maybe_unused]] int64_t wide")
    return f"static inline void {name}({', '.join(arguments)})\n{{\n{body}\n}}\n"


def _placeholder(name: str, dtype: torch.dtype, size: int) -> ir.TensorBox:
    layout = ir.FixedLayout(CPU, HELD.get(dtype, dtype), [size], [1])
    box = ir.TensorBox.create(ir.InputBuffer(name=name, layout=layout))
    out: ir.TensorBox = lowering.to_dtype(box, dtype)
    return out


def _lowered(module: GraphModule, boxes: list[ir.TensorBox]) -> list[Any]:
    inner = PointwiseSubgraphLowering(module, root_graph_lowering=V.graph)
    # what is dear and read often would be given a buffer: here it is made again for each row
    inline = patch.object(ir.StorageBox, "should_realize_on_reuse", lambda *_, **__: False)
    with V.set_graph_handler(inner), _patching, inline:  # type: ignore[arg-type]
        inner.run(*boxes)
        found: Any = inner.graph_outputs
        outputs = list(found) if isinstance(found, (tuple, list)) else [found]
        return [lowering.expand(lowering.to_dtype(x, torch.float32), [TILE]) for x in outputs]


def _loader(box: Any) -> Any:
    return box.make_loader()


def _loops(results: list[Any], names: list[str], outs: list[str], dtypes: dict[str, torch.dtype]) -> str:
    group = KernelGroup()
    group.args.input_buffers.update({n: f"in{k}" for k, n in enumerate(names)})
    group.args.output_buffers.update({n: f"out{k}" for k, n in enumerate(outs)})
    index = sympy_index_symbol_with_prefix(SymT.INDEX, 0)
    own = V.graph.get_dtype

    def get_dtype(name: str) -> torch.dtype:
        return dtypes[name] if name in dtypes else own(name)

    def stored(result: Any, out: str) -> LoopBody:
        def store(at: Any, _: Any) -> None:
            V.ops.store(out, at[0], result(list(at)).value)

        return LoopBody(store, ([index], ()), {index: TILE}, [index], ())

    with patch.object(V.graph, "get_dtype", get_dtype), patch.object(ir.FlexibleLayout, "allow_indexing", True):
        bodies = [stored(result, out) for result, out in zip(results, outs, strict=True)]
        proxy = CppKernelProxy(group)
        proxy.codegen_loop_bodies(bodies, [((TILE,), ())] * len(bodies))
        serial = ParallelDepth(parallel_depth=0, start_depth=0)
        with patch.object(proxy.loop_nest, "max_parallel_depth", lambda: serial):
            group.finalize_kernel(proxy, [])
    code = re.sub(rf"x0\s*<\s*static_cast<int64_t>\({TILE}L\)", "x0 < wide", group.loops_code.getvalue())
    # ours is several times as fast as the vector library's, which is what a soft-cap spends its time on
    return re.sub(r"\b(\w+)\.tanh\(\)", r"sdpa_rewrite::hyperbolic_tangent(\1)", code)
