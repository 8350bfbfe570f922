"""Names for graph nodes: which operator a node calls, of which kind it is, and where the user wrote it."""

from __future__ import annotations

import linecache
import re
from typing import Any

import torch
from torch.fx import Node

ALIASES = frozenset({"clone", "alias", "detach", "contiguous", "lift_fresh_copy", "lift_fresh", "_reshape_alias_copy"})
REGROUPS = frozenset({"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten"})
PERMUTES = frozenset({"permute", "transpose", "t"})
LAYOUT = ALIASES | REGROUPS | PERMUTES | {"expand", "repeat"}
CASTS = frozenset({"convert_element_type", "_to_copy", "to"})
CONTRACTIONS = frozenset({"bmm", "mm", "baddbmm", "addmm", "matmul"})
REDUCTIONS = frozenset({"sum", "amax", "amin", "any", "all", "mean"})
SOFTMAXES = frozenset({"_softmax", "_safe_softmax", "_log_softmax", "softmax"})
PIECEWISE = frozenset({"slice", "cat", "slice_scatter", "select_scatter", "constant_pad_nd"})
SPLITS = frozenset({"split", "split_with_sizes"})
SHAPE_READERS = frozenset(  # they read what a tensor looks like, never what it holds
    {"sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "new_empty", "new_empty_strided", "new_zeros"}
    | {"new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
)
NUMBERS = frozenset({"full", "full_like", "scalar_tensor", "zeros", "zeros_like", "ones", "ones_like", "new_zeros"})


def is_call(node: Any) -> bool:
    """Whether ``node`` calls an operator."""
    return isinstance(node, Node) and node.op == "call_function"


def opname(node: Node) -> str:
    """The operator's name without namespace and overload; the node's kind for what is not a call."""
    if node.op != "call_function":
        return node.op
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", str(target))


def is_pointwise(node: Node) -> bool:
    """Whether each position of the result depends on one position of each argument."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or opname(node) in CASTS


def value_of(node: Any) -> Any:
    """The fake value of a node; anything else as it is."""
    return node.meta.get("val") if isinstance(node, Node) else node


def is_drawn_mask(node: Any) -> bool:
    """The mask of ``native_dropout``: its second result, which depends on no value of its input."""
    return opname(node) == "getitem" and opname(node.args[0]) == "native_dropout" and node.args[1] == 1


def is_piece(node: Any) -> bool:
    """One of the parts that a tensor is split into."""
    return opname(node) == "getitem" and opname(node.args[0]) in SPLITS


def is_tensor(node: Any) -> bool:
    """Whether a node holds one tensor."""
    return isinstance(value_of(node), torch.Tensor)


def rank(node: Any) -> int:
    """The number of dimensions."""
    value = value_of(node)
    return value.dim() if isinstance(value, torch.Tensor) else 0


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_LIBRARY = re.compile(r"[/\\]torch[/\\](nn|_|functional|autograd|fx|utils)")


def source_line(node: Node | None) -> str:
    """The user's line that made ``node``, as ``file:line in function: code``; empty where the graph does not know."""
    trace = node.meta.get("stack_trace") if node is not None else None
    if not trace:
        return ""
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return ""
    own = [f for f in frames if not _LIBRARY.search(f["file"])]
    frame = (own or frames)[-1]
    code = linecache.getline(frame["file"], int(frame["line"])).strip()
    place = f"{frame['file']}:{frame['line']} in {frame['function']}"
    return f"{place}: {code}" if code else place
