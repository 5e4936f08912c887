"""The ranks' votes on the sites of a graph, kept in the group's store.

A rank posts what it decided about a site when it compiles (``post``, never waits).
Peers' votes are read only where a difference would show: by the guard that a rank runs
ahead of a site it refused, and by an exchange that has waited for a peer for more than
about a second. A rank that ends with a disagreement leaves word, so that peers which
nothing else tells do not wait for it.

A refusal for the number of rows says nothing about other numbers, so it has a name of
its own (``of_rows``): votes stay in the store when a graph is compiled for other sizes.
A rank that has decided both ways, since a knob changed, may run either graph; what it
will do is not known from its votes then, and they are told from no other.
"""

from __future__ import annotations

import logging
import re
import time
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from dcp_inductor import config, groups
from dcp_inductor.bounded_store import BoundedStore
from dcp_inductor.errors import (
    DCPDisagreementError,
    DCPTimeoutError,
    FaultRecord,
    with_way_on,
)

log = logging.getLogger(__name__)

ACCEPTED = "accepted"
_EITHER = "accepted and refused"
_LONGEST_NAP_S = 0.02

# Sites whose peers have all voted alike.
_settled: WeakKeyDictionary[ProcessGroup, set[str]] = WeakKeyDictionary()
# Group's name and site of the direct exchanges that this process has run: a graph from
# the cache runs without a vote.
_run: set[tuple[str, str]] = set()
# What this rank has voted, by site.
_own: WeakKeyDictionary[ProcessGroup, dict[str, str]] = WeakKeyDictionary()
# Recoveries so far; equal on all ranks, since a recovery is collective.
_recoveries: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def of_rows(site: str, rows: int | str) -> str:
    """The name under which a site of this many rows is refused for their number."""
    return f"{site}, {rows} rows"


_OF_ROWS = re.compile(r", (?P<rows>\d+) rows")


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
            why = (
                f"rank {group.rank()} waits {at} of group '{group_name}', but rank "
                f"{peer} has left the group: {store.get(key).decode()}"
            )
            raise DCPDisagreementError(with_way_on(why))


def post(group_name: str, site: str, vote: str) -> bool:
    """Record this rank's vote, ``ACCEPTED`` or a reason for refusing; does not wait.

    Returns whether that could be done.
    """
    return _post(groups.resolve(group_name), site, vote)


def _post(group: ProcessGroup, site: str, vote: str) -> bool:
    own = _own.setdefault(group, {})
    # What was accepted for some number of rows may have been so for this one as well.
    of_any = _OF_ROWS.sub("", site)
    accepted = ACCEPTED if (group.group_name, of_any) in _run else vote
    before = own.get(site, own.get(of_any, accepted))
    if before == _EITHER or (before == ACCEPTED) != (vote == ACCEPTED):
        vote = _EITHER
    try:
        groups.store(group).set(_key(site, group.rank()), vote)
    except (KeyError, RuntimeError) as error:
        # A fake group's store takes nothing, and a destroyed group has none. Without
        # votes a difference between ranks still ends in a timeout that names the site.
        log.debug("vote on site %s not posted: %s", site, error)
        return False
    own[site] = vote
    return True


def runs(group_name: str, site: str) -> None:
    """Note that this process runs the direct exchange of ``site``."""
    _run.add((group_name, site))


def reconsider() -> None:
    """Take back refusals of as many rows as ``config.max_tokens`` allows.

    Called whenever this process compiles, from a cache or not: its graphs may have been
    refused under a lower limit, and a peer must not think that they still run.
    """
    for group, own in list(_own.items()):
        for site, vote in list(own.items()):
            match = _OF_ROWS.search(site)
            allowed = match and 0 < int(match["rows"]) <= config.max_tokens
            if allowed and vote not in (ACCEPTED, _EITHER):
                _post(group, site, ACCEPTED)


def peers(group_name: str, site: str) -> dict[int, str]:
    """Votes on ``site`` posted so far by the other ranks; missing ones are left out."""
    group = groups.resolve(group_name)
    return _read(groups.store(group), site, group.rank(), group.size())


def _read(store: BoundedStore, site: str, rank: int, world_size: int) -> dict[int, str]:
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
        peer: vote
        for peer, vote in votes.items()
        if vote != _EITHER and (vote == ACCEPTED) != accepted
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


def check_waiting(group_name: str, site: str, rows: int = 0) -> None:
    """Raise where a peer will not come to the exchange that waits at ``site``.

    Args:
        group_name: the group.
        site: "" outside of a graph.
        rows: of the exchange; 0 where they are not known.

    Raises:
        DCPDisagreementError: a peer refused the site, or has left.
    """
    if site:
        for name in (site, of_rows(site, rows)) if rows else (site,):
            # A graph from the cache was not compiled here: no vote was cast.
            post(group_name, name, ACCEPTED)
            check(group_name, name, ACCEPTED)
    check_departures(group_name, site)


def guard(group_name: str, site: str, reason: str) -> None:
    """Run ahead of a site that this rank refused for ``reason``.

    Behind it this rank is in the graph's own collective, where nothing of ours ends a
    wait. So the first run of a site waits until every peer has voted. Votes again as
    well: a graph from the cache was not compiled here, so nothing else did.

    Raises:
        DCPDisagreementError: a peer accepted the site, or has left.
        DCPTimeoutError: a peer did not vote within ``config.timeout_s``.
    """
    group = groups.resolve(group_name)
    settled = _settled.setdefault(group, set())
    if site in settled or not post(group_name, site, reason):
        return
    timeout_s = config.read("timeout_s")
    deadline = time.monotonic() + timeout_s
    nap_s = 0.0005
    while not check(group_name, site, reason):
        check_departures(group_name, site)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _unheard(group, site, reason, timeout_s)
        time.sleep(min(nap_s, left_s))
        nap_s = min(nap_s * 1.5, _LONGEST_NAP_S)
    settled.add(site)


def _unheard(
    group: ProcessGroup, site: str, reason: str, timeout_s: float
) -> DCPTimeoutError:
    name, rank = group.group_name, group.rank()
    voted = peers(name, site)
    missing = [p for p in range(group.size()) if p != rank and p not in voted]
    why = (
        f"site {site} of group '{name}': rank {rank} keeps the graph's collectives "
        f"({reason}) and expected to hear that every rank does, but ranks {missing} "
        f"did not say so within {timeout_s:g} s. Set dcp_inductor's knobs, "
        "max_tokens among them, and the backend alike on all ranks, and compile alike, "
        "since other dynamic dims may give the site another name; or raise "
        "DCP_INDUCTOR_TIMEOUT_S if these ranks were only slow to compile"
    )
    leave(group, why)
    record = FaultRecord(
        op="site_guard", site=site, group_name=name, rank=rank, peer=missing[0],
        epoch_wanted=0, epoch_seen=0,
    )  # fmt: skip
    error = DCPTimeoutError(record, timeout_s)
    error.args = (with_way_on(why),)
    return error
