"""Labels drawn from the model's own predictions, whose gradients estimate Fisher matrices.

The formulas are in ``paper/fisher.py``; here is how their gradients travel back through the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_locoprop.paper.fisher import sampled_output_gradient
from torch_locoprop.paper.transfers import Linear, Transfer
from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.transfer_detection import MODEL_OUTPUT, Mark


class LayerOutput(NamedTuple):
    """What a layer's call in the model's forward pass returned."""

    layer: LayerRecord | None  # None: the layer has no local problem
    mark: Mark
    a: Tensor
    features: int  # the dimension of `a` that holds the features

    def predicts(self, transfer: Transfer | None) -> bool:
        """Return True if the model ends in this output, or in the transfer behind it."""
        finding = transfer_detection.resolve(
            self.mark, self.a.shape[-1] if self.features == -1 else 0
        )
        consumer = finding.consumer
        ends = consumer is None or MODEL_OUTPUT in consumer.consumers
        return finding.is_output and (ends or finding.transfer == self._own(transfer))

    def sampled_gradient(self, transfer: Transfer | None, generator: torch.Generator) -> Tensor:
        """Return ∂L/∂a for labels drawn from what the transfer predicts."""
        transfer = self._own(transfer)
        a = self.a.detach().movedim(self.features, -1)
        found = sampled_output_gradient(transfer or Linear(), a, generator)
        return found.movedim(-1, self.features)

    def _own(self, transfer: Transfer | None) -> Transfer | None:
        return self.layer.transfer if self.layer and self.layer.explicit else transfer


def send_sampled_gradients(
    outputs: Sequence[LayerOutput], transfer: Transfer | None, seed: int
) -> None:
    """Send the gradient of sampled labels back to every layer; no parameter's ``.grad`` changes.

    Args:
        outputs: the outputs of all layers in one forward pass.
        transfer: the output transfer, which says what distribution the model predicts.
        seed: of the draw.

    Raises:
        RuntimeError: if the model does not end in the output of a layer.
    """
    # A bias gradient is a sum over rows, a weight gradient a matrix product: ask for the former.
    wanted = [call.layer.trained[-1] for call in outputs if call.layer and call.layer.trained]
    if not wanted:
        return
    last = [call for call in outputs if call.predicts(transfer)]
    if not last:
        raise RuntimeError(
            "Labels are drawn from the output of the model's last Linear layer, but the model "
            "ends in something else. Use a variant and a regularizer that need no Fisher matrix."
        )
    generator = torch.Generator(last[0].a.device).manual_seed(seed)
    torch.autograd.grad(
        [call.a for call in last],
        wanted,
        [call.sampled_gradient(transfer, generator) for call in last],
        retain_graph=True,
        allow_unused=True,
    )
