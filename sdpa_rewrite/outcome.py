"""What became of one candidate: the only thing the engine tells the outside world.

Every candidate attention of a graph ends as one ``Outcome``.  It holds text and numbers only, no graph
node, so it can be printed, written as JSON and kept after the graph is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["fused", "recognised", "missed"]


@dataclass(frozen=True)
class Reason:
    """Why something was not done: the text, the role that failed, the graph node and the user's source line."""

    text: str
    role: str = ""
    node: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = f" [{self.role} at {self.node}]" if self.node else f" [{self.role}]" if self.role else ""
        return f"{self.text}{where}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Form:
    """A recognised attention in words.  ``scale`` is a sympy expression printed as text, or a tensor's description.

    ``name``: the named form of the library that it is, if it is one.
    """

    scale: str = "1"
    mask: str = "none"
    score: tuple[str, ...] = ()
    weight: tuple[str, ...] = ()
    softmax: str = "softmax"
    gqa: str = ""
    dropout: float = 0.0
    shape: str = ""
    dtype: str = ""
    gradients: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Outcome:
    """One candidate.

    ``status``: ``fused`` (a kernel runs), ``recognised`` (a proved attention that no emitter takes) or ``missed``.
    ``source``: the user's line as ``file:line in function: code``.  ``training``: the graph has this site's backward.
    ``reasons``: empty when fused; else each emitter's reasons, or the one reason of a miss.
    ``bytes_avoided``: size of the N x N tensors that are no longer made (0 unless fused; symbolic sizes use hints).
    """

    status: Status
    node: str
    source: str
    training: bool = False
    form: Form | None = None
    emitter: str = ""
    reasons: tuple[Reason, ...] = ()
    bytes_avoided: int = 0
    details: dict[str, Any] = field(default_factory=dict)
