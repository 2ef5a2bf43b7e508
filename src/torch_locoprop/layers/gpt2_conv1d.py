"""``Conv1D`` of Hugging Face's GPT-2: a linear layer that keeps its weight transposed, ``[n, d]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_locoprop.layers.linear import LinearLayer, refuses_tensors


@dataclass(frozen=True)
class TransposedLinear(LinearLayer):
    """The local problem's view of it: that of ``nn.Linear``, on the transposed weight."""

    d: int  # output features
    kind = "Conv1D"

    @classmethod
    def of(cls, module: nn.Module) -> TransposedLinear:
        return cls(int(module.nf))  # type: ignore[arg-type]

    def refuses(self, module: nn.Module) -> str | None:
        original: Any = next(cls for cls in type(module).__mro__ if cls.__name__ == self.kind)
        if type(module).forward is not original.forward or "forward" in vars(module):
            return f"{type(module).__name__} has a forward of its own"
        return refuses_tensors(module)

    def matrix(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.mT if name == "weight" else tensor

    def restored(self, name: str, matrix: Tensor, like: Tensor) -> Tensor:
        return self.matrix(name, matrix)

    def collect(self, inputs: Sequence[Tensor], outputs: Sequence[Any], like: Tensor) -> Tensor:
        return super().collect(inputs, outputs, like.mT)
