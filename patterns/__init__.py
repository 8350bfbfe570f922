"""One attention form a file, each named after the form it is.  Imported as ``sdpa_rewrite.patterns``."""

from __future__ import annotations

if __name__ == "patterns":
    raise ImportError("this folder is the package sdpa_rewrite.patterns; import it by that name")

from sdpa_rewrite.authoring.registry import active as active
from sdpa_rewrite.authoring.registry import register as register
from sdpa_rewrite.authoring.registry import scope as scope
from sdpa_rewrite.authoring.registry import unregister as unregister
