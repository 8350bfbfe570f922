"""Attention programs as users write them, drawn field by field.

A ``Program`` is a point in a grid of spellings: layout, scale, masks, order, softmax, casts, dropout, shapes.  It
runs as plain PyTorch over named tensors.  The first choice of each field is the plainest, so that a failing program
is made simpler by putting fields back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]

SHAPES = (  # batch, heads, queries, keys, head size, width of the values
    (2, 4, 6, 6, 8, 8),
    (1, 4, 6, 6, 8, 8),
    (2, 4, 1, 7, 8, 8),
    (2, 4, 7, 1, 8, 8),
    (2, 4, 5, 9, 8, 8),
    (2, 4, 9, 5, 8, 8),
    (3, 4, 7, 7, 16, 16),
    (2, 4, 6, 6, 8, 12),
    (2, 4, 6, 5, 12, 8),
    (1, 4, 1, 1, 8, 8),
    (1, 4, 33, 33, 5, 5),
    (2, 4, 4, 4, 4, 4),
    (4, 4, 8, 8, 8, 8),
    (2, 4, 17, 65, 3, 3),
    (2, 4, 6, 6, 1, 1),
    (0, 4, 6, 6, 8, 8),
    (2, 4, 0, 6, 8, 8),
    (2, 4, 6, 0, 8, 8),
)
ORDERS = tuple(itertools.permutations(("scale", "cap", "bias", "mask")))

CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": (
        *("bhsd", "bshd", "flat", "qkv_chunk", "qkv_unbind", "einsum_bhsd", "einsum_bshd", "bmm3d", "baddbmm"),
        *("k_transposed", "vt_out", "window5d", "same", "single3d", "two_d", "time_major", "scores_transposed"),
    ),
    "shape": SHAPES,
    "kv_heads": (4, 4, 4, 2, 1),
    "groups": ("repeat_interleave", "expand", "grouped5d", "broadcast"),
    "scale": (
        *("mul", "div", "none", "on_q", "on_k", "on_both", "div_q", "tensor_mul", "tensor_div", "per_head", "per_row"),
        *("sqrt_size", "one", "negative", "zero", "learned", "learned_log", "on_projection"),
    ),
    "order": ORDERS,
    "cap": ("none", "none", "none", "tanh", "clamp"),
    "bias": (
        *("none", "none", "none", "heads", "full", "hij", "ij", "alibi", "row", "column", "stride0", "int"),
        *("inf_entries", "inf_rows", "padding", "padding_finfo", "scalar", "q_dependent"),
    ),
    "keep": (
        *("none", "none", "arange", "tril", "triu", "buffer", "window", "offset", "pad", "pad_int", "random"),
        *("random_heads", "rows", "two", "stacked", "prefix", "all", "nothing", "self_exclude"),
    ),
    "apply": ("fill", "where", "add", "multiply", "fill_not"),
    "fill": ("-inf", "min", "-1e9", "-1e4", "-1e30", "-100"),
    "softmax": (
        *("softmax", "float32", "cast", "positive_dim", "exp_sum", "exp_sum_max", "log_softmax", "safe", "nan_to_num"),
        *("sink", "sink_max", "minus_max", "reciprocal", "plus_one"),
    ),
    "weight": ("none", "none", "none", "p0", "given", "dropout", "gate", "refill", "again", "half_cast"),
    "out": ("plain", "merge", "transpose", "residual", "float", "twice"),
    "dtype": (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "autocast": (False, False, False, True),
    "strides": ("contiguous", "transposed", "padded", "expanded"),
    "grads": ("none", "all", "qkv", "q", "k", "v", "kv", "extras"),
    "magnitude": (1.0, 1.0, 0.1, 4.0),
    "dynamic": (*(False,) * 7, True),  # ten times as slow to compile
}
PLAIN: dict[str, Any] = {name: choices[0] for name, choices in CHOICES.items()}

BATCHLESS = ("single3d", "two_d")
FUSED_INPUT = ("qkv_chunk", "qkv_unbind", "same")


@dataclass(frozen=True)
class Program:
    """One spelling of attention; ``seed`` draws its data."""

    layout: str = "bhsd"
    shape: tuple[int, int, int, int, int, int] = SHAPES[0]
    kv_heads: int = 4
    groups: str = "repeat_interleave"
    scale: str = "mul"
    order: tuple[str, ...] = ORDERS[0]
    cap: str = "none"
    bias: str = "none"
    keep: str = "none"
    apply: str = "fill"
    fill: str = "-inf"
    softmax: str = "softmax"
    weight: str = "none"
    out: str = "plain"
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    strides: str = "contiguous"
    grads: str = "none"
    magnitude: float = 1.0
    dynamic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Put right what does not go together."""
        b, h, s, t, d, e = self.shape
        fix: dict[str, Any] = {}
        if self.layout in FUSED_INPUT:
            fix |= {"kv_heads": h, "shape": (b, h, s, s, d, d)}
        if self.layout in BATCHLESS:
            fix |= {"kv_heads": 1, "shape": (1 if self.layout == "two_d" else b, 1, s, t, d, e)}
        if self.layout in ("bmm3d", "baddbmm", "time_major", "window5d", "einsum_bhsd", "einsum_bshd") and (
            self.groups in ("grouped5d", "broadcast")
        ):
            fix["groups"] = "expand"
        if self.groups == "broadcast" and self.kv_heads not in (1, h):
            fix["groups"] = "expand"
        if self.layout in ("vt_out", "scores_transposed", "k_transposed") and self.groups == "grouped5d":
            fix["groups"] = "repeat_interleave"
        if self.autocast:
            fix["dtype"] = torch.float32
        for name, value in fix.items():
            object.__setattr__(self, name, value)

    def describe(self) -> str:
        """The fields that are not plain, as the call that makes this program."""
        plain = Program()
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return f"Program({', '.join(changed)})"

    def simpler(self) -> list[Program]:
        """The same program with one field put back."""
        changed = [n for n in PLAIN if getattr(self, n) != PLAIN[n]]
        return [p for p in (replace(self, **{n: PLAIN[n]}) for n in changed) if p != self]


def draw(random: Random) -> Program:
    """A program at random: a few fields are moved off the plain one, or all of them."""
    names = list(CHOICES)
    moved = names if random.random() < 0.35 else random.sample(names, random.randint(3, 9))
    return Program(**{n: random.choice(CHOICES[n]) for n in moved}, seed=random.randrange(1 << 16))


# -- data ----------------------------------------------------------------------------------------------------


def tensors(program: Program) -> Tensors:
    """The inputs of ``program``, by name, in the layout in which it reads them."""
    b, h, s, t, d, e = program.shape
    g = torch.Generator().manual_seed(program.seed)
    dtype = program.dtype

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g)

    m, kv = program.magnitude, program.kv_heads
    out: Tensors = {}
    if program.layout in FUSED_INPUT:
        width = h * d
        if program.layout == "same":
            out["x"] = randn(b, h, s, d) * m
        else:
            out["x"] = randn(b, s, 3 * width) * m
    else:
        out = {"q": randn(b, h, s, d) * m, "k": randn(b, kv, t, d) * m, "v": randn(b, kv, t, e)}
        out = {n: _strided(_stored(program, n, x), program.strides) for n, x in out.items()}
    out |= _extras(program, randn, rand, out)
    return out


def _stored(program: Program, name: str, x: Tensor) -> Tensor:
    """From (batch, heads, positions, size) to how the program keeps it."""
    layout = program.layout
    if layout in ("bshd", "einsum_bshd"):
        return x.transpose(1, 2).contiguous()
    if layout == "flat":
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])
    if layout == "time_major":
        return x.permute(2, 0, 1, 3).reshape(x.shape[2], x.shape[0], x.shape[1] * x.shape[3])
    if layout == "k_transposed" and name == "k":
        return x.mT.contiguous()
    if layout == "window5d":
        return torch.stack([x, x.flip(2)], 1)
    if layout == "single3d":
        return x[:, 0]
    if layout == "two_d":
        return x[0, 0]
    return x


def _strided(x: Tensor, strides: str) -> Tensor:
    if strides == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if strides == "padded":
        return F.pad(x, (0, 3))[..., : x.shape[-1]]
    if strides == "expanded" and x.shape[0]:
        return x[:1].expand(x.shape)
    return x.contiguous()


def _extras(program: Program, randn: Any, rand: Any, qkv: Tensors) -> Tensors:
    """What the scale, the masks, the sink and the weights read."""
    b, h, s, t, _, _ = program.shape
    out: Tensors = {}
    if program.scale in ("tensor_mul", "tensor_div", "learned", "learned_log"):
        value = {"tensor_mul": 0.37, "tensor_div": 2.7, "learned": 0.6, "learned_log": -0.5}[program.scale]
        out["scale"] = torch.tensor(value, dtype=program.dtype)
    if program.scale == "per_head":
        out["scale"] = (rand(h, 1, 1) * 0.7 + 0.3).to(program.dtype)
    if program.scale == "per_row":
        out["scale"] = (rand(b, 1, s, 1) * 0.7 + 0.3).to(program.dtype)
    shapes = {
        "heads": (b, h, s, t),
        "full": (b, 1, s, t),
        "hij": (h, s, t),
        "ij": (s, t),
        "row": (b, h, s, 1),
        "column": (b, 1, 1, t),
        "stride0": (b, 1, 1, t),
        "inf_entries": (b, 1, s, t),
        "inf_rows": (s, t),
        "scalar": (),
    }
    if program.bias in shapes:
        bias = randn(*shapes[program.bias])
        if program.bias == "inf_entries":
            bias = bias.masked_fill(rand(*bias.shape) < 0.3, -math.inf)
        if program.bias == "inf_rows":
            bias = bias.masked_fill((torch.arange(s) % 3 == 1)[:, None], -math.inf)
        out["bias"] = bias.expand(b, h, s, t) if program.bias == "stride0" else bias
    if program.bias == "int":
        out["bias"] = (rand(s, t) * 4).to(torch.int64)
    if program.bias == "alibi":
        out["bias"] = 2.0 ** -torch.arange(1, h + 1).to(program.dtype)
    if program.bias in ("padding", "padding_finfo"):
        out["bias"] = (rand(b, t) > 0.3).to(torch.int64)
    keep = program.keep
    if keep == "buffer":
        out["keep"] = torch.tril(torch.ones(80, 80)).view(1, 1, 80, 80)
    if keep in ("pad", "pad_int", "two", "stacked"):
        lengths = (rand(b) * t).long() + (0 if program.fill == "-inf" else 1)
        out["keep"] = torch.arange(t)[None] < lengths[:, None]
        if keep == "pad_int":
            out["keep"] = out["keep"].to(torch.int64)
    if keep == "random":
        out["keep"] = rand(b, 1, s, t) > 0.3
    if keep == "random_heads":
        out["keep"] = rand(b, h, s, t) > 0.3
    if keep == "rows":
        out["keep"] = (rand(s, t) > 0.3) & (torch.arange(s) % 3 != 1)[:, None]
    if program.softmax in ("sink", "sink_max"):
        out["sink"] = randn(h)
    if program.weight == "given":
        out["dropped"] = rand(b, h, s, t) > 0.2
    if program.weight == "gate":
        out["gate"] = rand(h, 1, 1).to(program.dtype)
    if program.weight in ("refill", "again"):
        out["refill"] = rand(b, 1, s, t) > 0.3
    return out


def leaves(program: Program, inputs: Tensors) -> list[str]:
    """The names of the inputs that require a gradient."""
    floats = [n for n, x in inputs.items() if x.is_floating_point() and n != "keep"]
    main = [n for n in floats if n in ("q", "k", "v", "x")]
    chosen = {
        "none": [],
        "all": floats,
        "qkv": main,
        "extras": [n for n in floats if n not in main],
        "q": [n for n in main if n in "qx"],
        "k": [n for n in main if n in "kx"],
        "v": [n for n in main if n in "vx"],
        "kv": [n for n in main if n in "kvx"],
    }
    return chosen[program.grads]


# -- the program ---------------------------------------------------------------------------------------------


Change = Callable[[Tensor], Tensor]


def run(
    program: Program,
    x: Tensors,
    wide: torch.dtype = torch.float32,
    scores: Change | None = None,
    probabilities: Change | None = None,
) -> Tensor:
    """What the user wrote.  ``wide`` is what float32 in it stands for (float64 in the exact run).

    ``scores`` and ``probabilities`` change these on their way: for programs that are something else.
    """
    if program.autocast:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _attention(program, x, wide, scores, probabilities)
    return _attention(program, x, wide, scores, probabilities)


def _attention(
    program: Program, x: Tensors, wide: torch.dtype, change: Change | None, change_probabilities: Change | None
) -> Tensor:
    q, k, v = _heads(program, x)
    q, k = _scale_operands(program, q, k, x)
    scores = _scores(program, q, k, x)
    scores = change(scores) if change is not None else scores
    steps = program.order
    if program.layout == "baddbmm" and program.bias != "none":
        steps = tuple(step for step in steps if step != "bias")
    for step in steps:
        scores = _step(program, step, scores, q, x)
    probabilities = _softmax(program, scores, x, wide)
    probabilities = change_probabilities(probabilities) if change_probabilities is not None else probabilities
    return _output(program, _values(program, _weigh(program, probabilities, x), v), q)


def _heads(program: Program, x: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as the scores read them."""
    b, h, s, _, d, e = program.shape
    layout, kv = program.layout, program.kv_heads
    if layout == "same":
        return x["x"], x["x"], x["x"]
    if layout == "qkv_chunk":
        b, s = x["x"].shape[:2]
        q, k, v = (y.view(b, s, h, d).transpose(1, 2) for y in x["x"].chunk(3, -1))
        return q, k, v
    if layout == "qkv_unbind":
        b, s = x["x"].shape[:2]
        q, k, v = x["x"].reshape(b, s, 3, h, d).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v
    q, k, v = x["q"], x["k"], x["v"]
    if program.scale == "on_projection":
        q = q * 0.3
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if layout == "flat":
        b = q.shape[0]
        q = q.reshape(b, q.shape[1], h, d).transpose(1, 2)
        k = k.reshape(b, k.shape[1], kv, d).permute(0, 2, 1, 3)
        v = v.reshape(b, v.shape[1], kv, e).transpose(1, 2)
    if layout == "time_major":  # (positions, batch, heads * size), as fairseq has it
        b = q.shape[1]
        q = q.contiguous().view(q.shape[0], b * h, d).transpose(0, 1)
        k = _repeat(program, k.reshape(k.shape[0], b, kv, d).permute(1, 2, 0, 3), 1).reshape(b * h, k.shape[0], d)
        v = _repeat(program, v.reshape(v.shape[0], b, kv, e).permute(1, 2, 0, 3), 1).reshape(b * h, v.shape[0], e)
        return q, k, v
    if layout == "einsum_bshd":
        return q, _repeat(program, k, 2), _repeat(program, v, 2)
    if layout == "window5d":
        return q, _repeat(program, k, 2), _repeat(program, v, 2)
    if layout in BATCHLESS:
        return q, k, v
    if program.groups == "grouped5d" and kv != h:
        return q.unflatten(1, (kv, h // kv)), k.unsqueeze(2), v.unsqueeze(2)
    k, v = _repeat(program, k, 1), _repeat(program, v, 1)
    if layout in ("bmm3d", "baddbmm"):
        q, k, v = (y.reshape(y.shape[0] * y.shape[1], y.shape[2], y.shape[3]) for y in (q, k, v))
    return q, k, v


def _repeat(program: Program, x: Tensor, at: int) -> Tensor:
    """Grouped heads, one for each query head."""
    n = program.shape[1] // program.kv_heads
    if n == 1 or program.groups == "broadcast":
        return x
    if program.groups == "repeat_interleave":
        return x.repeat_interleave(n, dim=at)
    shape = [*x.shape[: at + 1], n, *x.shape[at + 1 :]]
    return x.unsqueeze(at + 1).expand(shape).flatten(at, at + 1)


def _scale_operands(program: Program, q: Tensor, k: Tensor, x: Tensors) -> tuple[Tensor, Tensor]:
    c = program.shape[4] ** -0.5
    if program.scale == "on_q":
        return q * c, k
    if program.scale == "div_q":
        return q / math.sqrt(q.size(-1)), k
    if program.scale == "on_k":
        return q, k * c
    if program.scale == "on_both":
        return q * c**0.5, k * c**0.5
    return q, k


def _scores(program: Program, q: Tensor, k: Tensor, x: Tensors) -> Tensor:
    layout = program.layout
    if layout == "einsum_bhsd":
        return torch.einsum("bhid,bhjd->bhij", q, k)
    if layout == "einsum_bshd":
        return torch.einsum("bihd,bjhd->bhij", q, k)
    if layout == "k_transposed":
        return q @ k
    if layout == "scores_transposed":
        return (k @ q.transpose(-2, -1)).transpose(-2, -1)
    if layout == "same":
        return q @ q.mT
    if layout == "baddbmm":
        bias = _bias(program, q, x, k.shape[-2])
        if bias is None:
            empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
            scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=0.7)
        else:
            full = bias.expand(q.shape[0] // program.shape[1], program.shape[1], q.shape[1], k.shape[1])
            scores = torch.baddbmm(full.flatten(0, 1).to(q.dtype), q, k.transpose(1, 2), beta=1.0, alpha=0.7)
    elif layout in ("bmm3d", "time_major"):
        scores = torch.bmm(q, k.transpose(1, 2))
    elif layout == "two_d":
        return torch.mm(q, k.t())
    else:
        scores = torch.matmul(q, k.transpose(-1, -2))
    if layout in ("bmm3d", "baddbmm", "time_major"):
        h = program.shape[1]
        return scores.view(scores.shape[0] // h, h, scores.shape[1], scores.shape[2])
    if program.groups == "grouped5d" and scores.dim() == 5 and layout != "window5d":
        return scores.flatten(1, 2)
    return scores


def _step(program: Program, step: str, scores: Tensor, q: Tensor, x: Tensors) -> Tensor:
    if step == "scale":
        return _scaled(program, scores, x)
    if step == "cap":
        return _capped(program, scores)
    if step == "bias":
        bias = _bias(program, q, x, scores.shape[-1])
        return scores if bias is None else scores + _fit(program, bias)
    return _masked(program, scores, x)


def _scaled(program: Program, scores: Tensor, x: Tensors) -> Tensor:
    kind, c = program.scale, program.shape[4] ** -0.5
    if kind == "mul":
        return scores * c
    if kind == "div":
        return scores / math.sqrt(program.shape[4])
    if kind == "tensor_mul" or kind == "learned":
        return x["scale"] * scores
    if kind == "tensor_div":
        return scores / x["scale"]
    if kind == "learned_log":
        return scores * x["scale"].exp()
    if kind in ("per_head", "per_row"):
        return scores * _fit(program, x["scale"])
    if kind == "sqrt_size":
        return scores / float(scores.size(-1)) ** 0.5
    if kind == "one":
        return scores * 1.0
    if kind == "negative":
        return scores * -0.5
    if kind == "zero":
        return scores * 0.0
    return scores


def _capped(program: Program, scores: Tensor) -> Tensor:
    if program.cap == "tanh":
        return torch.tanh(scores / 5.0) * 5.0
    if program.cap == "clamp":
        return scores.clamp(-3.0, 3.0)
    return scores


def _fit(program: Program, mask: Tensor) -> Tensor:
    """A mask over (batch, heads, queries, keys), or the last of these, for scores of this layout's rank."""
    if mask.dim() == 4:
        if program.layout == "single3d":
            return mask[:, 0]
        if program.layout == "two_d":
            return mask[0, 0]
        if program.layout == "window5d":
            return mask.unsqueeze(1)
    if mask.dim() == 3 and program.layout in BATCHLESS:
        return mask[0]
    return mask


def _bias(program: Program, q: Tensor, x: Tensors, keys: int) -> Tensor | None:
    kind = program.bias
    if kind == "none":
        return None
    if kind == "alibi":
        queries = q.shape[1] if program.layout == "einsum_bshd" else q.shape[-2]
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        return x["bias"].view(1, -1, 1, 1) * distance.view(1, 1, queries, keys)
    if kind == "padding":
        return (1.0 - x["bias"][:, None, None, :].to(q.dtype)) * -10000.0
    if kind == "padding_finfo":
        return (1.0 - x["bias"][:, None, None, :].to(q.dtype)) * torch.finfo(program.dtype).min
    if kind == "q_dependent":  # relative position: a bias that is a function of the query
        if program.layout in ("bmm3d", "baddbmm", "time_major", "window5d", *BATCHLESS, "einsum_bshd") or q.dim() != 4:
            return None
        return q.mean(-1, keepdim=True) * torch.arange(keys).to(q.dtype)
    return x["bias"]


def _visible(program: Program, scores: Tensor, x: Tensors) -> Tensor:
    """True where a position takes part."""
    s, t = scores.shape[-2], scores.shape[-1]
    i, j = torch.arange(s)[:, None], torch.arange(t)[None, :]
    kind = program.keep
    if kind == "arange":
        return j <= i
    if kind == "tril":
        return torch.tril(torch.ones(s, t, dtype=torch.bool))
    if kind == "triu":
        return ~torch.triu(torch.ones(s, t), diagonal=1).bool()
    if kind == "buffer":
        return _fit(program, x["keep"][:, :, :s, :t]) != 0
    if kind == "window":
        return (j <= i) & (j > i - 3)
    if kind == "offset":
        return j <= i + (t - s)
    if kind in ("pad", "pad_int", "stacked"):
        return _fit(program, x["keep"][:, None, None, :]).bool()
    if kind == "two":
        return _fit(program, x["keep"][:, None, None, :]) & (j <= i)
    if kind == "prefix":
        return (j <= i) | (j < 2)
    if kind == "all":
        return torch.ones(s, t, dtype=torch.bool)
    if kind == "nothing":
        return torch.zeros(s, t, dtype=torch.bool)
    if kind == "self_exclude":
        return i != j
    return _fit(program, x["keep"])


def fill_value(program: Program) -> float:
    """What a masked score becomes."""
    return torch.finfo(program.dtype).min if program.fill == "min" else float(program.fill)


def _masked(program: Program, scores: Tensor, x: Tensors) -> Tensor:
    if program.keep == "none":
        return scores
    visible, fill = _visible(program, scores, x), fill_value(program)
    if program.keep == "stacked":
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) == 1, -math.inf)
    if program.dtype == torch.float16 or program.autocast:
        fill = max(fill, -60000.0) if math.isfinite(fill) else fill
    if program.apply == "where":
        return torch.where(visible, scores, fill)
    if program.apply == "add":
        return scores + torch.zeros(visible.shape, dtype=scores.dtype).masked_fill(~visible, fill)
    if program.apply == "multiply" and math.isfinite(fill):
        return scores + (1.0 - visible.to(scores.dtype)) * fill
    if program.apply == "fill_not":
        return scores.masked_fill(torch.logical_not(visible), fill)
    return scores.masked_fill(visible == 0, fill)


def _softmax(program: Program, scores: Tensor, x: Tensors, wide: torch.dtype) -> Tensor:
    kind, dtype = program.softmax, scores.dtype
    if kind == "float32":
        return F.softmax(scores, dim=-1, dtype=wide).to(dtype)
    if kind == "cast":
        return F.softmax(scores.to(wide), dim=-1).type_as(scores)
    if kind == "positive_dim":
        return torch.softmax(scores, scores.dim() - 1)
    if kind == "exp_sum":
        e = torch.exp(scores)
        return e / e.sum(-1, keepdim=True)
    if kind == "exp_sum_max" and scores.shape[-1]:
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        return e / e.sum(dim=-1, keepdim=True)
    if kind == "reciprocal" and scores.shape[-1]:
        e = (scores - scores.max(-1, keepdim=True)[0]).exp()
        return e * (1.0 / e.sum(-1, keepdim=True))
    if kind == "log_softmax":
        return torch.log_softmax(scores, -1).exp()
    if kind == "safe":
        empty = (scores == -math.inf).all(-1, keepdim=True)
        return torch.where(empty, 0.0, scores.softmax(-1))
    if kind == "nan_to_num":
        return scores.softmax(-1).nan_to_num(0.0)
    if kind == "minus_max" and scores.shape[-1]:
        return (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1)
    if kind in ("sink", "sink_max"):
        sink = x["sink"].reshape(-1, 1, 1).expand(*scores.shape[:-3], -1, scores.shape[-2], 1)
        sink = sink[0] if program.layout == "two_d" else sink
        if program.layout == "single3d":
            sink = x["sink"].reshape(1, 1, 1).expand(scores.shape[0], scores.shape[1], 1)
        joined = torch.cat([scores, sink.to(scores.dtype)], -1)
        if kind == "sink_max":
            joined = joined - joined.max(-1, keepdim=True).values
        return joined.softmax(-1)[..., :-1]
    if kind == "plus_one":  # off by one: a sink of logit zero
        e = scores.exp()
        return e / (1.0 + e.sum(-1, keepdim=True))
    return torch.softmax(scores, -1)


def _weigh(program: Program, p: Tensor, x: Tensors) -> Tensor:
    kind = program.weight
    if kind == "p0":
        return F.dropout(p, 0.0, True)
    if kind == "dropout":
        return F.dropout(p, 0.25, True)
    if kind == "given":
        return p * _fit(program, x["dropped"]) / 0.8
    if kind == "gate":
        return p * _fit(program, x["gate"])
    if kind == "refill":
        return p.masked_fill(_fit(program, x["refill"]), 0.0)
    if kind == "again":
        p = p * ~_fit(program, x["refill"])
        return p / (p.sum(-1, keepdim=True) + 1e-6)
    if kind == "half_cast" and p.dtype == torch.float32:
        return p.to(torch.float32)
    return p


def _values(program: Program, p: Tensor, v: Tensor) -> Tensor:
    layout = program.layout
    p = p.to(v.dtype)
    if layout == "einsum_bhsd":
        return torch.einsum("bhij,bhjd->bhid", p, v)
    if layout == "einsum_bshd":
        return torch.einsum("bhij,bjhd->bihd", p, v)
    if layout in ("bmm3d", "baddbmm", "time_major"):
        h = program.shape[1]
        out = torch.bmm(p.reshape(p.shape[0] * h, p.shape[2], p.shape[3]), v)
        return out.view(out.shape[0] // h, h, out.shape[1], out.shape[2])
    if layout == "vt_out":
        return v.transpose(-2, -1) @ p.transpose(-2, -1)
    if program.groups == "grouped5d" and v.dim() == 5 and layout != "window5d":
        kv = program.kv_heads
        return (p.unflatten(1, (kv, program.shape[1] // kv)) @ v).flatten(1, 2)
    return p @ v


def _output(program: Program, out: Tensor, q: Tensor) -> Tensor:
    kind = program.out
    if kind == "merge" and out.dim() == 4:
        return out.transpose(1, 2).contiguous().view(out.shape[0], out.shape[2], out.shape[1] * out.shape[3])
    if kind == "transpose":
        return out.transpose(-2, -1)
    if kind == "residual" and out.shape == q.shape:
        return out + q
    if kind == "float":
        return out * 2.0
    if kind == "twice":
        return out * out.detach().sigmoid()
    return out
