"""``Conv1D`` of Hugging Face's GPT-2: a linear layer that keeps its weight transposed, ``[n, d]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_locoprop.layers.base import own_forward, serves, unusual_tensors
from torch_locoprop.layers.linear import LinearLayer


@dataclass(frozen=True)
class TransposedLinear(LinearLayer):
    """The adapter of ``Conv1D``: that of ``nn.Linear``, on the transposed weight."""

    d: int  # output features
    kind = "Conv1D"
    arguments = ("x",)

    def refuses(self, module: nn.Module) -> str | None:
        original: Any = next(cls for cls in type(module).__mro__ if cls.__name__ == self.kind)
        return own_forward(module, original.forward) or unusual_tensors(module)

    def matrix(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.mT if name == "weight" else tensor

    def restored(self, name: str, matrix: Tensor, like: Tensor) -> Tensor:
        return self.matrix(name, matrix)

    def collect(self, inputs: Sequence[Tensor], outputs: Sequence[Any], like: Tensor) -> Tensor:
        return super().collect(inputs, outputs, like.mT)

    def with_outputs(self, d: int) -> None:
        """Return None: the first dimension of the weight has the inputs."""
        return None


@serves("transformers.pytorch_utils.Conv1D")
def gpt2_conv1d(module: Any) -> TransposedLinear:
    """Return the layer kind of GPT-2's ``Conv1D``."""
    return TransposedLinear(int(module.nf))
