"""Which emitter takes a site."""

from __future__ import annotations

from sdpa_rewrite import config
from sdpa_rewrite.emit.base import Emitter
from sdpa_rewrite.emit.flex import Flex
from sdpa_rewrite.emit.fused import Fused
from sdpa_rewrite.emit.sdpa import SDPA
from sdpa_rewrite.site import Site

EMITTERS: dict[str, Emitter] = {e.name: e for e in (Fused(), SDPA(), Flex())}


def choose(site: Site) -> tuple[Emitter | None, dict[str, list[str]]]:
    """The first emitter of ``config.emitters`` that has no reason against, and the reasons of those asked before."""
    against: dict[str, list[str]] = {}
    for name in config.emitters:
        emitter = EMITTERS.get(name)
        reasons = [f"there is no emitter {name!r}"] if emitter is None else emitter.reasons_against(site)
        if emitter is not None and not reasons:
            return emitter, against
        against[name] = reasons
    return None, against
