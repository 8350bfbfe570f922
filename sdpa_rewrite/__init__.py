"""Hand-written attention becomes fused attention under ``torch.compile``, forward and backward.

    torch.compile(model, backend="sdpa_rewrite")    # a backend; or, for the stock backend:
    sdpa_rewrite.enable()                           # the whole process (also SDPA_REWRITE=1 in the environment)
    with sdpa_rewrite.enabled(): ...                # a scope
    print(sdpa_rewrite.explain(model, *inputs))     # what was fused, what was not, and why

Importing this is cheap: Inductor is imported when something compiles.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sdpa_rewrite import compat

compat.check_torch_version()

from sdpa_rewrite import config as config  # noqa: E402
from sdpa_rewrite.authoring import Match as Match  # noqa: E402
from sdpa_rewrite.authoring import NoMatch as NoMatch  # noqa: E402
from sdpa_rewrite.authoring import Pattern as Pattern  # noqa: E402
from sdpa_rewrite.authoring import PatternError as PatternError  # noqa: E402
from sdpa_rewrite.authoring import Program as Program  # noqa: E402
from sdpa_rewrite.authoring import Scalar as Scalar  # noqa: E402
from sdpa_rewrite.authoring import pattern as pattern  # noqa: E402
from sdpa_rewrite.explanation import explain as explain  # noqa: E402
from sdpa_rewrite.hook import disable as disable  # noqa: E402
from sdpa_rewrite.hook import enable as enable  # noqa: E402
from sdpa_rewrite.hook import enabled as enabled  # noqa: E402
from sdpa_rewrite.hook import is_enabled as is_enabled  # noqa: E402
from sdpa_rewrite.outcome import Form as Form  # noqa: E402
from sdpa_rewrite.outcome import Outcome as Outcome  # noqa: E402
from sdpa_rewrite.outcome import Reason as Reason  # noqa: E402
from sdpa_rewrite.report import Report as Report  # noqa: E402

if TYPE_CHECKING:
    from sdpa_rewrite import patterns as patterns
    from sdpa_rewrite import testing as testing
    from sdpa_rewrite.graph_pass import attention_pass as attention_pass

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "attention_pass":  # a class of Inductor's: not before it is asked for
        from sdpa_rewrite.graph_pass import attention_pass

        return attention_pass
    if name in ("patterns", "testing"):  # they read graphs: not before they are asked for
        return importlib.import_module(f"sdpa_rewrite.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
