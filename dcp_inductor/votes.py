"""The ranks' votes on the sites of a graph, kept in the group's store.

A rank posts what it decided about a site when it compiles (``post``, never waits).
Peers' votes are read only where a difference would show: by the guard that a rank runs
in place of a site it refused, and by an exchange that has waited for a peer for more
than about a second. A rank that ends with a disagreement leaves word, so that peers
which nothing else tells do not wait for it.
"""

from __future__ import annotations

import logging
import time
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup, Store

from dcp_inductor import groups
from dcp_inductor.errors import DCPDisagreementError

log = logging.getLogger(__name__)

ACCEPTED = "accepted"
# A guard looks again at most this often while votes are missing.
_PATIENCE_S = 1.0

# Sites whose peers have all voted alike, and when to look at the others again.
_settled: WeakKeyDictionary[ProcessGroup, set[str]] = WeakKeyDictionary()
_next_look: WeakKeyDictionary[ProcessGroup, dict[str, float]] = WeakKeyDictionary()
# Recoveries so far; equal on all ranks, since a recovery is collective.
_recoveries: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def _key(site: str, rank: int) -> str:
    return f"dcp_inductor/vote/{site}/{rank}"


def _departure_key(group: ProcessGroup, rank: int) -> str:
    # What was said before a recovery is not read after it, and needs no clearing.
    return f"dcp_inductor/departure/{_recoveries.get(group, 0)}/{rank}"


def leave(group: ProcessGroup, why: str) -> None:
    """Tell the peers that this rank comes to no exchange until the group recovers."""
    groups.store(group).set(_departure_key(group, group.rank()), why)


def recovered(group: ProcessGroup) -> None:
    """Count a recovery of the group; all its ranks are back."""
    _recoveries[group] = _recoveries.get(group, 0) + 1


def check_departures(group_name: str, site: str) -> None:
    """Raise where a peer has left; for a rank that waits at ``site``.

    Raises:
        DCPDisagreementError: names the site, this rank, the peer and why it left.
    """
    group = groups.resolve(group_name)
    store = groups.store(group)
    for peer in range(group.size()):
        key = _departure_key(group, peer)
        if peer != group.rank() and store.check([key]):
            at = f"at site {site}" if site else "in an exchange"
            raise DCPDisagreementError(
                f"rank {group.rank()} waits {at} of group '{group_name}', but rank "
                f"{peer} has left the group: {store.get(key).decode()}. Call "
                "dcp_inductor.recover(group) on all ranks to go on"
            )


def post(group_name: str, site: str, vote: str) -> None:
    """Record this rank's vote, ``ACCEPTED`` or a reason for refusing; does not wait."""
    group = groups.resolve(group_name)
    try:
        groups.store(group).set(_key(site, group.rank()), vote)
    except RuntimeError as error:
        # A fake group's store takes nothing. Without votes a difference between ranks
        # still ends in a timeout that names the site.
        log.debug("vote on site %s not posted: %s", site, error)


def peers(group_name: str, site: str) -> dict[int, str]:
    """Votes on ``site`` posted so far by the other ranks; missing ones are left out."""
    group = groups.resolve(group_name)
    return _read(groups.store(group), site, group.rank(), group.size())


def _read(store: Store, site: str, rank: int, world_size: int) -> dict[int, str]:
    votes = {}
    for peer in range(world_size):
        key = _key(site, peer)
        if peer != rank and store.check([key]):
            votes[peer] = store.get(key).decode()
    return votes


def check(group_name: str, site: str, own_vote: str) -> bool:
    """Raise where a peer decided differently; whether all peers have voted.

    Raises:
        DCPDisagreementError: names the site, the ranks on both sides and their reasons;
            waiting peers read it with :func:`check_departures`.
    """
    group = groups.resolve(group_name)
    votes = peers(group_name, site)
    accepted = own_vote == ACCEPTED
    others = {
        peer: vote for peer, vote in votes.items() if (vote == ACCEPTED) != accepted
    }
    if others:
        told = "; ".join(
            f"rank {peer}: {vote}" for peer, vote in sorted(others.items())
        )
        why = (
            f"site {site} of group '{group_name}': rank {group.rank()} decided "
            f"'{own_vote}', but {told}. Every rank must run the same exchange; make "
            "the ranks' graphs equal but for their own rank, or switch the rewrite "
            'off with options={"dcp_inductor.enable": False} on all ranks'
        )
        leave(group, why)
        raise DCPDisagreementError(why)
    return len(votes) == group.size() - 1


def guard(group_name: str, site: str, reason: str) -> None:
    """Run ahead of a site that this rank refused for ``reason``; never waits.

    Votes again as well: a graph from the cache was not compiled here, so nothing else
    did.

    Raises:
        DCPDisagreementError: a peer accepted the site.
    """
    group = groups.resolve(group_name)
    settled = _settled.setdefault(group, set())
    next_look = _next_look.setdefault(group, {})
    now = time.monotonic()
    if site in settled or now < next_look.get(site, 0.0):
        return
    post(group_name, site, reason)
    if check(group_name, site, reason):
        settled.add(site)
    next_look[site] = now + _PATIENCE_S
