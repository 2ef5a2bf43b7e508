"""The linear map of a layer whose weight is on several processes, on the input rows of this process.

Each process has some rows of ``[W b]`` and some input rows. The pre-activations of its input rows need
all of ``[W b]``, which is gathered, and the gradient is added up over the input rows of all processes.
This saves communication if there are more input rows than weights (``communication.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from torch import Tensor

from torch_locoprop.distributed.fully_shard import Shards
from torch_locoprop.paper.linear_map import LinearMap
from torch_locoprop.paper.tensors import Tensors, join, split


class ExchangedMap:
    """A linear map whose products with this process's input rows have the outputs of all processes.

    Args:
        whole: the map of the whole layer.
        shards: which rows of the layer's tensors this process has.
        trained: names of the tensors whose gradients are needed.
    """

    holds_rows: ClassVar[bool] = False  # the problem has other rows too

    def __init__(self, whole: LinearMap, shards: Shards, trained: Collection[str]) -> None:
        self._whole, self._shards, self._trained = whole, shards, trained

    def forward(self, x: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        own = {"weight": weight} | ({} if bias is None else {"bias": bias})
        return self._whole.forward(x, **split(self._shards.whole(join(own)), own))

    def weight_grad(self, x: Any, delta: Tensor) -> Tensors:
        of_rows = self._whole.weight_grad(x, delta)
        wanted = {name: of_rows[name] for name in self._trained}
        found = split(self._shards.own_sum(join(wanted)), wanted)
        return {name: tensor.contiguous() for name, tensor in found.items()}

    def inputs(self, x: Any, weight: bool, bias: bool) -> Tensor:
        raise NotImplementedError("This process has some of the problem's rows only.")

    def row_blocks(self, x: Any) -> Iterator[Tensor]:
        raise NotImplementedError("This process has some of the problem's rows only.")
