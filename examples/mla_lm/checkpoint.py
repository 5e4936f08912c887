"""Reads a rank's slices of the tensors of a Hugging Face checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from examples.mla_lm.parallel import Layout

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Weights:
    """The tensors below one prefix of a checkpoint, read and sliced when asked for.

    ``weights / "self_attn"`` is the same one level down.
    """

    def __init__(
        self,
        directory: str | Path,
        layout: Layout,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.directory = Path(directory)
        self.layout = layout
        self.dtype = dtype
        self._prefix = ""
        self._files = _files_of(self.directory)

    def __truediv__(self, name: str | int) -> Weights:
        below = object.__new__(Weights)
        below.__dict__ = dict(self.__dict__, _prefix=f"{self._prefix}{name}.")
        return below

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._files

    def tensor(
        self,
        name: str,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A tensor, or the given rows (dim 0) and columns (dim 1) of it.

        Raises:
            KeyError: the checkpoint has no such tensor.
        """
        name = self._prefix + name
        if name not in self._files:
            raise KeyError(f"{self.directory} has no tensor {name!r}")
        # Opened per tensor: a handle that stays open would hold every shard in memory
        # maps.
        with safe_open(self._files[name], "pt") as file:
            part = file.get_slice(name)
            rows = slice(None) if rows is None else rows
            value = part[rows] if columns is None else part[rows, columns]
        return value.to(dtype or self.dtype).contiguous()

    def linear(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> nn.Linear:
        """``nn.Linear`` with this rank's rows (outputs) or columns (inputs) of a layer.

        A column slice makes a partial sum that an all-reduce completes, so its bias is
        divided by the number of TP ranks: the sum then adds it once.
        """
        inside = self / name
        weight = inside.tensor("weight", rows, columns)
        layer = nn.Linear(
            weight.shape[1], weight.shape[0], bias="bias" in inside, device="meta"
        )
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if "bias" in inside:
            bias = inside.tensor("bias", rows)
            if columns is not None:
                bias = bias / self.layout.tp_size
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer


def _files_of(directory: Path) -> dict[str, Path]:
    """File of every tensor, from a sharded checkpoint's index or the single file."""
    if (directory / _INDEX).exists():
        index = json.loads((directory / _INDEX).read_text())["weight_map"]
        return {name: directory / file for name, file in index.items()}
    if (directory / _SINGLE).exists():
        with safe_open(directory / _SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), directory / _SINGLE)
    raise FileNotFoundError(
        f"expected {_SINGLE} or {_INDEX} in {directory}, found neither; give the "
        "directory of a Hugging Face checkpoint in safetensors format"
    )
