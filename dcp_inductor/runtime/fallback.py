"""Where a direct exchange cannot be made: counted, told once, or raised."""

from __future__ import annotations

import logging
import threading

from dcp_inductor import groups
from dcp_inductor.capability import Refusal

log = logging.getLogger(__name__)

_told: set[tuple[str, str, str]] = set()
_lock = threading.Lock()


def take(op: str, knob: str, mode: str, group_name: str, refusal: Refusal) -> None:
    """Account for one call of ``op`` that takes the reference because of ``refusal``.

    Raises:
        RuntimeError: ``mode`` is "force", with the reason.
    """
    if mode == "force":
        raise RuntimeError(
            f"{op}: config.{knob} is 'force', but a direct exchange cannot be made "
            f"over group '{group_name}': {refusal.detail}. Remove the cause, or set it "
            "to 'auto'"
        )
    # Imported here: it takes a second, which a run without fallbacks need not spend.
    from torch._dynamo.utils import counters

    counters["dcp_inductor"][f"fallback.{refusal.code}"] += 1
    key = (op, group_name, refusal.code)
    with _lock:
        if key in _told:
            return
        _told.add(key)
    level = logging.WARNING if groups.rank(group_name) == 0 else logging.DEBUG
    message = "%s over group '%s' uses the collectives: %s"
    log.log(level, message, op, group_name, refusal.detail)
