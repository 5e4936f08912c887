"""What a case of the collection is, and the registry that holds them all.

A recipe is a function ``fn(ctx, *tensors)`` that spells a merge or a gather the way
some code does. ``ctx`` gives rank, world size and groups as plain values, so that they
become constants of the traced graph just as they do in a served model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

REWRITE = "rewrite"
GATHER_ONLY = "gather only"
LSE_ONLY = "LSE gather only"
EQUAL_OR_REFUSED = "equal or refused"


@dataclass(frozen=True)
class Context:
    """One rank's view of the groups.

    ``row`` and ``column`` are the two groups of a two-level exchange: the ranks are
    laid out as a grid of ``world_size // 2`` rows of two; they are given as (name, rank
    within, size).
    """

    rank: int
    world_size: int
    group_name: str
    heads_per_rank: int
    group: ProcessGroup | None = field(default=None, compare=False)
    row: tuple[str, int, int] = ("", 0, 1)
    column: tuple[str, int, int] = ("", 0, 1)

    @property
    def heads(self) -> int:
        return self.world_size * self.heads_per_rank


@dataclass(frozen=True)
class Case:
    """A recipe with what is needed to run and judge it.

    ``result`` says what the recipe returns of the merged output and global LSE: a key
    of ``inputs.RESULTS`` or a function of the same kind, None where there is no dense
    value. ``inputs`` is a key of ``inputs.INPUTS`` or such a function. ``deviates``
    marks a near miss whose value must be far from the dense merge, ``slight`` one that
    is only less exact, ``ambiguous`` one whose graph on some rank is exactly that of
    the merge, so that the ranks may end in an error. ``leaves`` are the collectives
    that are no part of a site and have to stay; ``tolerance`` the recipe's own distance
    to the dense result where its algebra is not in fp32; ``other_tokens`` are counts
    that a symbolic graph is run with as well. ``dynamic`` is False where the pass
    leaves a graph of symbolic tokens alone. ``traceable`` and ``unbacked`` are False
    where torch itself cannot trace the spelling (with an unbacked token count).
    """

    id: str
    family: str
    fn: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: str | Callable
    result: str | Callable | None
    expect: str = REWRITE
    note: str = ""
    token_multiple_of_ranks: bool = False
    token_for_every_rank: bool = False
    unbacked: bool = True
    dynamic: bool = True
    deviates: bool = False
    slight: bool = False
    ambiguous: bool = False
    grid: bool = False
    traceable: bool = True
    leaves: tuple[str, ...] = ()
    tolerance: float | None = None
    other_tokens: tuple[int, ...] = ()
    world_sizes: tuple[int, ...] = (2, 4)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def num_tokens(self, tokens: int, world_size: int) -> int:
        if self.token_for_every_rank:
            return max(tokens, world_size + 1)
        return tokens * world_size if self.token_multiple_of_ranks else tokens


class Registry:
    """The cases by id, in the order in which they were added."""

    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}

    def add(
        self,
        case_id: str,
        family: str,
        fn: Callable,
        inputs: str = "ol",
        result: str | None = "HS",
        **attributes,
    ) -> None:
        if case_id in self._cases:
            raise ValueError(f"case {case_id} is registered twice")
        self._cases[case_id] = Case(case_id, family, fn, inputs, result, **attributes)

    def case(
        self, case_id: str, family: str, inputs: str = "ol", result="HS", **attributes
    ):
        """Decorator form of :meth:`add`."""

        def register(fn: Callable) -> Callable:
            self.add(case_id, family, fn, inputs, result, **attributes)
            return fn

        return register

    def amend(self, case_id: str, **attributes) -> None:
        """Change attributes of a case; raises KeyError for an id that is not there."""
        self._cases[case_id] = replace(self._cases[case_id], **attributes)

    def __iter__(self) -> Iterator[Case]:
        return iter(self._cases.values())

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, case_id: str) -> Case:
        return self._cases[case_id]


REGISTRY = Registry()
add = REGISTRY.add
case = REGISTRY.case
