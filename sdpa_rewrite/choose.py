"""Which emitter takes a site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdpa_rewrite import config, costs
from sdpa_rewrite.emit.base import Emitter
from sdpa_rewrite.emit.flex import Flex
from sdpa_rewrite.emit.fused import Fused
from sdpa_rewrite.emit.sdpa import SDPA
from sdpa_rewrite.site import Site

EMITTERS: dict[str, Emitter] = {e.name: e for e in (Fused(), SDPA(), Flex())}


@dataclass
class Choice:
    """The emitter that takes a site, if one does, the reasons of those asked before, and estimates for ``work``."""

    emitter: Emitter | None = None
    against: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    work: costs.Work | None = None


def choose(site: Site, now: str, emitters: Sequence[str]) -> Choice:
    """The first of ``emitters`` that has no reason against and is not slower than what is there ``now``.

    Where nothing is known of the time, as on other devices than CPU, an emitter is taken to be faster.
    """
    work = costs.work_of(site) if config.cost_model else None
    choice = Choice(work=work)
    today = costs.estimate(work, now) if work is not None else None
    if today is not None:
        choice.seconds[now] = today
    for name in emitters:
        emitter = EMITTERS.get(name)
        reasons = [f"there is no emitter {name!r}"] if emitter is None else emitter.reasons_against(site)
        own = costs.estimate(work, name) if work is not None and not reasons else None
        if own is not None:
            choice.seconds[name] = own
            if today is not None and costs.is_slower(own, today):
                reasons = [slower(own, today)]
        if emitter is not None and not reasons:
            choice.emitter = emitter
            return choice
        choice.against[name] = reasons
    return choice


def slower(own: float, today: float) -> str:
    """The reason not to fuse what is fast."""
    return f"estimated at {in_words(own)}, what is there now at {in_words(today)} (config.cost_model)"


def in_words(seconds: float) -> str:
    """``12 us``, ``3.4 ms``."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
