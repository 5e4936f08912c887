"""Where a direct exchange cannot be made: counted, told once, or raised."""

from __future__ import annotations

import logging
import threading
import weakref

import torch.distributed as dist

from dcp_inductor import groups
from dcp_inductor.capability import Refusal
from dcp_inductor.errors import DCPError

log = logging.getLogger(__name__)

# What was told of a group, by op and reason. Keyed by the object: a group that is made
# again under an old name is another.
_told: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, str]]]
_told = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def take(op: str, knob: str, mode: str, group_name: str, refusal: Refusal) -> None:
    """Account for one call of ``op`` that takes the reference because of ``refusal``.

    Raises:
        DCPError: ``mode`` is "force", with the reason.
    """
    if mode == "force":
        raise DCPError(
            f"{op}: config.{knob} is 'force', but a direct exchange cannot be made "
            f"over group '{group_name}': {refusal.detail}. Remove the cause, or set it "
            "to 'auto'"
        )
    # Imported here: it takes a second, which a run without fallbacks need not spend.
    from torch._dynamo.utils import counters

    counters["dcp_inductor"][f"fallback.{refusal.code}"] += 1
    key = (op, refusal.code)
    with _lock:
        told = _told.setdefault(groups.resolve(group_name), set())
        if key in told:
            return
        told.add(key)
    level = logging.WARNING if groups.rank(group_name) == 0 else logging.DEBUG
    message = "dcp_inductor: %s over group '%s' uses the collectives: %s"
    log.log(level, message, op, group_name, refusal.detail)


def forget(group: dist.ProcessGroup) -> None:
    """Tell anew, once, what stands in the way of direct exchanges of ``group``."""
    with _lock:
        _told.pop(group, None)
