"""A pattern's function, traced: a graph over its parameters whose nodes know the lines that made them."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sdpa_rewrite.authoring.hole import program_op
from sdpa_rewrite.authoring.parameters import Parameter, PatternError, Variant
from sdpa_rewrite.cleanroom import clean_room
from sdpa_rewrite.lift.ops import source_line

HINTS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)  # sizes that stand for unknown ones while tracing


def axes_that_agree(
    function: Callable[..., Any], variant: Variant, hints: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Which axis each axis is, where ``function`` works only if they have one size; ``hints``: sizes to trace with.

    Raises ``PatternError``.
    """
    with clean_room():
        _, symbols, _ = traced(function.__name__, function, variant, True, hints)
    first: dict[Any, str] = {}
    return {axis: first.setdefault(symbol, axis) for axis, symbol in symbols.items()}


def traced(
    name: str,
    function: Callable[..., Any],
    variant: Variant,
    any_size: bool,
    hints: Mapping[str, int] | None = None,
) -> tuple[Graph, dict[str, Any], list[Node]]:
    """The graph of one variant, the size of each named axis, and the placeholders.  Raises ``PatternError``.

    ``any_size``: the axes must stay symbolic; ``hints``: sizes to trace with.
    """
    from torch._inductor.decomposition import select_decomp_table

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)  # a tensor from outside is told below
    axes = dict.fromkeys(a for p in variant.parameters for a in p.axes if isinstance(a, str))
    if len(axes) > len(HINTS) and not hints:
        raise PatternError(f"{name}: more than {len(HINTS)} named axes")
    known = hints or dict(zip(axes, HINTS, strict=False))
    sizes = {axis: _symbol(env, axis, known[axis]) for axis in axes}
    order = [p for p in variant.parameters if p.kind != "program"]
    with mode:
        examples = [_example(p, sizes) for p in order]

    scalars: dict[int, str] = {}

    def body(*values: Any) -> Any:
        scalars.update((id(x), p.name) for p, x in zip(order, values, strict=True) if p.kind == "scalar")
        given = dict(variant.fixed)
        given |= {p.name: functools.partial(_program, p.name) for p in variant.parameters if p.kind == "program"}
        given |= {p.name: x for p, x in zip(order, values, strict=True)}
        return function(**given)

    try:
        with mode, torch.no_grad(), _symbolic_roots(), _lines(scalars), enable_python_dispatcher():
            module = make_fx(body, dict(select_decomp_table()), tracing_mode="real")(*examples)
    except PatternError:
        raise
    except _NotOpen as error:
        raise PatternError(f"{name}: {error}{authors_line(error)}") from error
    except Exception as error:
        raise PatternError(f"{name}: its function cannot be traced: {_why(error, variant, sizes)}") from error
    module.graph.eliminate_dead_code()
    _leave_open(name, module.graph, dict(zip(module.graph.find_nodes(op="placeholder"), order, strict=True)))
    for axis, size in sizes.items():
        if any_size and not isinstance(env.replace(size.node.expr), sympy.Symbol):
            raise PatternError(f"{name}: its function fixes the axis {axis} to one size; axes may have any")
    if not any(isinstance(n, Node) for n in pytree.tree_leaves(output_of(module.graph))):
        raise PatternError(f"{name}: its function returns no tensor" + _when(variant))
    for parameter, node in zip(order, (n for n in module.graph.nodes if n.op == "placeholder"), strict=True):
        if not node.users:
            raise PatternError(f"{name}: {parameter.name} is not used" + _when(variant))
    if any(n.op == "get_attr" for n in module.graph.nodes):
        raise PatternError(f"{name}: it reads a tensor from outside; declare it as a parameter")
    symbols = {axis: size.node.expr for axis, size in sizes.items()}
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    named = dict(zip((p.name for p in order), inputs, strict=True))
    _keep(module)
    return module.graph, symbols, [named[p.name] for p in order]


def output_of(graph: Graph) -> Any:
    """What a graph returns."""
    return next(iter(graph.find_nodes(op="output"))).args[0]


def _why(error: Exception, variant: Variant, sizes: Mapping[str, Any]) -> str:
    """An error in words that an author knows: sizes by the names of axes, the author's line, and what was declared."""
    text = str(error).split("\n")[0]
    if "data-dependent" in text:
        text = "it asks for a scalar's value; what Python decides upon is declared as a choice (Literal, bool)"
    for axis, size in sizes.items():
        text = re.sub(rf"\b{size.node.expr}\b", axis, text)
    declared = ", ".join(str(p) for p in variant.parameters if p.kind == "tensor")
    return f"{type(error).__name__}: {text}{authors_line(error)}; declared are {declared}"


def authors_line(error: Exception) -> str:
    """The author's line that ``error`` comes from, in brackets."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_AUTHORS)]
    return f" ({own[-1].filename}:{own[-1].lineno}: {own[-1].line})" if own else ""


def _leave_open(name: str, graph: Graph, parameters: Mapping[Node, Parameter]) -> None:
    """Give an operator that asked for a scalar's number the scalar itself, a 0-d tensor, so that it may be any number.

    Raises ``PatternError`` where the operator takes numbers only.
    """
    for number in graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
        (scalar,) = number.args
        for user in number.users:
            if not _takes_a_tensor(user, number):
                known = parameters[scalar].name if scalar in parameters else "a scalar"
                written = user.meta.get("original_aten") or user.target  # before it was decomposed
                raise PatternError(f"{name}: {_takes_a_number(written, known)} ({source_line(user)})")
        number.replace_all_uses_with(scalar)
        graph.erase_node(number)


def _takes_a_tensor(user: Node, number: Node) -> bool:
    """Whether ``number`` stands only where ``user`` takes tensors."""
    if not isinstance(user.target, torch._ops.OpOverload) or number in user.kwargs.values():
        return False
    declared = user.target._schema.arguments
    takers = [d for d, a in zip(declared, user.args, strict=False) if a is number]
    return bool(takers) and all(isinstance(d.type, torch.TensorType) for d in takers)


def _takes_a_number(operator: Any, scalar: str) -> str:
    """Why a pattern cannot leave ``scalar`` open where ``operator`` takes it."""
    called = getattr(operator, "_opname", None) or getattr(operator, "__name__", str(operator))
    return (
        f"{called} takes {scalar} as a number of Python's, which cannot be left open; "
        "write it with operators that take tensors, or declare the numbers that it may be as a choice (Literal)"
    )


def _when(variant: Variant) -> str:
    return f" when {variant}" if variant.fixed else ""


_modules: list[torch.fx.GraphModule] = []  # a graph lives as long as its module


def _keep(module: torch.fx.GraphModule) -> None:
    _modules.append(module)


def _symbol(env: ShapeEnv, axis: str, hint: int) -> Any:
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(f"size_{axis}")
    symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint, source=source)


def _example(parameter: Parameter, sizes: Mapping[str, Any]) -> Any:
    if parameter.kind == "scalar":
        return torch.empty(())
    return torch.empty([sizes[a] if isinstance(a, str) else a for a in parameter.axes], dtype=parameter.dtype)


@contextlib.contextmanager
def _symbolic_roots() -> Iterator[None]:
    """``math.sqrt`` of a size stays symbolic, as it does in Dynamo."""
    plain = math.sqrt

    def sqrt(x: Any, /) -> Any:
        return torch.sym_sqrt(x) if isinstance(x, (torch.SymInt, torch.SymFloat)) else plain(x)

    math.sqrt = sqrt
    try:
        yield
    finally:
        math.sqrt = plain


def _program(name: str, x: Tensor) -> Tensor:
    """A program hole while a pattern is traced: an operator that nothing knows."""
    out: Tensor = program_op()(x, name)
    return out


@contextlib.contextmanager
def _lines(scalars: Mapping[int, str]) -> Iterator[None]:
    """Nodes that are traced in the block know the line of the author's that called the operator.

    Raises ``_NotOpen`` where an operator asks for the value of one of ``scalars``, names by the identity of a tensor.
    """
    with fx_traceback.preserve_node_meta(), _Lines(scalars):
        yield


class _NotOpen(Exception):
    """An operator takes the value of a scalar that is to stand for any; the message says which, and what to do."""


class _Lines(TorchFunctionMode):
    def __init__(self, scalars: Mapping[int, str]) -> None:
        super().__init__()
        self.scalars = scalars

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _note_line(sys._getframe(1))
        try:
            return _with_scalars(func, args, kwargs or {})
        except GuardOnDataDependentSymNode as error:
            asked = [self.scalars[id(x)] for x in (*args, *(kwargs or {}).values()) if id(x) in self.scalars]
            if not asked or func is Tensor.__bool__:  # what Python decides upon has another remedy
                raise
            raise _NotOpen(_takes_a_number(func, asked[0])) from error


def _note_line(frame: FrameType | None) -> None:
    """Let the nodes that are made next know the author's line among ``frame`` and its callers."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_AUTHORS):
        frame = frame.f_back
    if frame is not None:
        code = frame.f_code
        fx_traceback.set_stack_trace([f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'])


def _with_scalars(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` makes of a scalar, which is a 0-d tensor while a pattern is traced, where it wants a number."""
    given = {**dict(zip(("size", "fill_value"), args, strict=False)), **kwargs}
    if func is torch.full and isinstance(given.get("fill_value"), Tensor):
        value: Tensor = given["fill_value"]
        return value.to(given.get("dtype") or value.dtype).expand(given["size"])
    overload = getattr(func, "_overloadname", "")
    if overload == "Scalar" and len(args) > 1 and isinstance(args[1], Tensor):  # aten.mul.Scalar
        return func.overloadpacket.Tensor(*args, **kwargs)
    return func(*args, **kwargs)


_NOT_THE_AUTHORS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
