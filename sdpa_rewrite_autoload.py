"""``SDPA_REWRITE=1 python train.py``: what torch calls at the end of ``import torch`` (entry point ``torch.backends``).

A module of its own, outside the package: torch turns any error in here into a failed ``import torch``, and
loading ``sdpa_rewrite.anything`` would run the package first.  So this file imports nothing until it is
asked to, and nothing that goes wrong leaves it.
"""

import os
import sys


def activate() -> None:
    """Enable the rewriting for the process if ``SDPA_REWRITE`` says so; never raise."""
    if os.environ.get("SDPA_REWRITE", "0").strip().lower() not in ("1", "true", "yes", "on"):
        return
    try:
        from sdpa_rewrite.hook import enable

        enable()
    except Exception as error:
        # not a warning: under `python -W error` that would raise
        print(f"sdpa_rewrite: SDPA_REWRITE is set but has no effect: {error}", file=sys.stderr)
