"""Layers whose weights are divided by input features: ``RowwiseParallel`` of tensor parallelism.

Each process has some columns of W, the same columns of the inputs X, and all of the bias. An output
feature needs a whole row of W. For a step, the columns are therefore exchanged for rows, by one
all-to-all for the weight and one for its gradient, and so are the rows of the solution for columns. The
features of the inputs are gathered once. In between, the layer is one whose rows are divided and whose
inputs all processes have, as ``fully_shard.py`` has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_locoprop.distributed.collectives import exchanged, gathered, padded_to, row_counts
from torch_locoprop.distributed.fully_shard import Shards, local


@dataclass(frozen=True, eq=False)
class ColumnShards(Shards):
    """The columns of a layer's weight that this process has, and the rows that it solves.

    The last dimension of the mesh along which rows are divided for the step is the one along which
    columns are divided otherwise.
    """

    divides_features = True

    @property
    def _columns(self) -> int:
        """The dimension of the mesh along which columns are divided."""
        return self.divided[-1]

    @property
    def _group(self) -> Any:
        return self.mesh.get_group(self._columns)

    @property
    def _row_placements(self) -> Any:
        from torch.distributed.tensor import Shard

        like: Any = self.tensors["weight"]
        return [Shard(0) if i == self._columns else p for i, p in enumerate(like.placements)]

    def _shares(self, count: int) -> list[int]:
        """Return how many of some rows or columns each process along the dimension has."""
        return row_counts(count, int(self.mesh.size(self._columns)))

    def _own_share(self, rows: Tensor) -> Tensor:
        """Return those of some rows that this process solves, from all that its group has."""
        most = self._shares(len(rows))[0]
        return rows[most * self.mesh.get_local_rank(self._columns) :][:most]

    # ---- tensors ---------------------------------------------------------------------------------

    def to_rows(self, name: str, tensor: Tensor) -> Tensor:
        part = local(tensor)
        if name == "bias":
            return self._own_share(part)
        widths, rows = self._shares(tensor.shape[1]), self.own_count
        sent = [height * part.shape[1] for height in self._shares(len(part))]
        taken = [rows * width for width in widths]
        blocks = torch.split(exchanged(part.flatten(), sent, taken, self._group), taken)
        shaped = [block.view(rows, n) for block, n in zip(blocks, widths, strict=True)]
        return torch.cat(shaped, dim=1)

    def from_rows(self, name: str, rows: Tensor) -> Tensor:
        count = self.pieces[-2]
        if name == "bias":
            return gathered(padded_to(rows, self._shares(count)[0]), self._group)[:count]
        widths = self._shares(rows.shape[1])
        width = widths[self.mesh.get_local_rank(self._columns)]
        parts = torch.cat([part.flatten() for part in torch.split(rows, widths, dim=1)])
        sent = [len(rows) * each for each in widths]
        taken = [height * width for height in self._shares(count)]
        return exchanged(parts, sent, taken, self._group).view(count, width)

    def counted_once(self, name: str, part: Tensor) -> Tensor:
        return self._own_share(part) if name == "bias" else part

    # ---- inputs ----------------------------------------------------------------------------------

    def are_known(self, x: Tensor) -> bool:
        given: Any = x
        return all(getattr(each, "dim", None) == x.dim() - 1 for each in given.placements)

    def all_features(self, x: Tensor) -> Tensor:
        n = self.tensors["weight"].shape[1]
        return gathered(padded_to(x.T, self._shares(n)[0]), self._group)[:n].T
