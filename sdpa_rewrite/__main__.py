"""``python -m sdpa_rewrite bench``: what the rewriting gains on this machine."""

from __future__ import annotations

import sys

from sdpa_rewrite.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
