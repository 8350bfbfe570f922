"""Options, in the style of ``torch._inductor.config``.

    sdpa_rewrite.config.dropout = "any"                 # from here on, in this thread
    with sdpa_rewrite.config.patch(strict=True): ...    # in this block, in this thread

As with torch's own configs, a value that is set holds for the thread (or context) that set it; another thread
sees the defaults and the environment.  ``sdpa_rewrite.enable()`` is the switch for a whole process.
Each option has an environment variable for its default, named where it is read.
"""

# No `from __future__ import annotations` and no names imported besides modules: install_config_module takes
# every plain value it finds in this module for an option.
import os
import sys
import typing

import torch.utils._config_module as _config_module

from sdpa_rewrite import compat

if typing.TYPE_CHECKING:
    from torch.utils._config_typing import *  # noqa: F403


def _flag(variable: str, default: bool) -> bool:
    text = os.environ.get(variable, "").strip().lower()
    return text in ("1", "true", "yes", "on") if text else default


def _names(variable: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    text = os.environ.get(variable)
    return default if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


# Rewrite attention when the stock backend="inductor" compiles, in this thread.  None: as sdpa_rewrite.enable()
# and disable() last said for the process; at first that is SDPA_REWRITE (1 or 0).  `sdpa_rewrite.is_enabled()`
# tells what holds.  backend="sdpa_rewrite" always rewrites, unless its options say enabled=False.
enabled: bool | None = None

# An exception in the pass is raised instead of logged and counted.  For tests and bug reports: by default the
# graph stays as it was and compilation goes on.  SDPA_REWRITE_STRICT.
strict: bool = _flag("SDPA_REWRITE_STRICT", False)

# Run what an emitter makes of a site on small random instances, forward and backward, and compare with the site's
# meaning, before it is put in.  The site itself is always proved; this guards against an emitter that builds
# something else.  Costs tens of milliseconds for all layers that are alike.  SDPA_REWRITE_VERIFY.
verify: bool = _flag("SDPA_REWRITE_VERIFY", True)

# What a fused kernel may do with dropout.  SDPA_REWRITE_DROPOUT.
#   "exact": a site with dropout is fused only by a kernel that draws the very mask which the unfused compiled
#            program would draw from the same seed
#   "any":   any mask of the same distribution will do; on CUDA the site then goes to ATen's kernels, which draw it
dropout: str = os.environ.get("SDPA_REWRITE_DROPOUT", "exact")

# Keep torch's own attention patterns on in the graphs that we rewrite.  They are off there since they take
# softmax over queries or over heads for softmax over keys.  Other graphs are never touched.
# SDPA_REWRITE_KEEP_TORCH_PATTERNS.
keep_torch_patterns: bool = _flag("SDPA_REWRITE_KEEP_TORCH_PATTERNS", False)

# Kinds of sites to leave alone, by the words that explain() uses, such as ("dropout", "training", "sliding window").
# SDPA_REWRITE_DISABLED_FORMS, separated by commas.
disabled_forms: tuple[str, ...] = _names("SDPA_REWRITE_DISABLED_FORMS")

# Patterns that are registered but shall not be used, by name.  SDPA_REWRITE_DISABLED_PATTERNS, separated by commas.
disabled_patterns: tuple[str, ...] = _names("SDPA_REWRITE_DISABLED_PATTERNS")

# Attention on CPU that is a call already, of ATen's kernel (F.scaled_dot_product_attention) or of FlexAttention, goes
# to our own kernels too.  (Where FlexAttention is trained on CPU, whatever this says: torch has nothing for it.)
# SDPA_REWRITE_UPGRADE_CALLS.
upgrade_calls: bool = _flag("SDPA_REWRITE_UPGRADE_CALLS", True)

# Emitters that may take a site, the one to be asked first in front.  SDPA_REWRITE_EMITTERS, separated by commas.
emitters: tuple[str, ...] = _names("SDPA_REWRITE_EMITTERS", ("fused", "sdpa", "flex"))

# A site is fused only where that is estimated to be no slower than what is there (on CPU, within 5 %: its memory
# is less; see sdpa_rewrite.costs).
# False: whatever can be fused is.  SDPA_REWRITE_COST_MODEL.
cost_model: bool = _flag("SDPA_REWRITE_COST_MODEL", True)

# A file that `python -m sdpa_rewrite calibrate` wrote on this machine; empty: the costs that come with the package.
# SDPA_REWRITE_COSTS.
costs: str = os.environ.get("SDPA_REWRITE_COSTS", "")

# Print the log of the rewriting on stderr, from this level on ("debug", "info", "warning"; "1" is "info").
# Read once, on import.  TORCH_LOGS="+sdpa_rewrite" does the same the torch way.  SDPA_REWRITE_LOG.
log: str = os.environ.get("SDPA_REWRITE_LOG", "")

# Options that do not change what is compiled, so that changing them keeps the caches warm.  (`enabled` is not in
# the key since a graph is either ours, and then it is on, or has no key of ours.)
_cache_config_ignore_prefix: list[str] = ["enabled", "log"]


def problems() -> tuple[str, ...]:
    """What is wrong with the values that hold now, in words; empty when nothing is."""
    here = sys.modules[__name__]
    found = []
    if here.dropout not in ("exact", "any"):
        found.append(f"sdpa_rewrite.config.dropout must be 'exact' or 'any', not {here.dropout!r}")
    for name in ("disabled_forms", "disabled_patterns", "emitters"):
        value = getattr(here, name)
        if not isinstance(value, (tuple, list)) or not all(isinstance(item, str) for item in value):
            found.append(f"sdpa_rewrite.config.{name} must be a tuple of strings, not {value!r}")
    return tuple(found)


def names() -> tuple[str, ...]:
    """The names of all options."""
    return tuple(name for name in sys.modules[__name__].get_config_copy() if not name.startswith("_"))


_config_module.install_config_module(sys.modules[__name__])
compat.make_context_local(sys.modules[__name__])
