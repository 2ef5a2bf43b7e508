"""Draws labels from the model's predictions and sends their gradients back through the model.

These gradients estimate Fisher matrices. The formulas are in ``paper/fisher.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_locoprop.paper.fisher import sampled_output_gradient
from torch_locoprop.paper.tensors import seeded
from torch_locoprop.paper.transfers import Linear, Transfer
from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.node_marks import MODEL_OUTPUT, Mark


class LayerOutput(NamedTuple):
    """The output of one call of a layer in a forward pass of the model."""

    layer: LayerRecord | None  # None: the layer has no local problem
    mark: Mark  # mark of the call's node in the autograd graph
    a: Tensor
    features: int  # the dimension of `a` that holds the features

    def predicts(self, transfer: Transfer | None) -> bool:
        """Return True if the model ends in this output, or in its transfer.

        Args:
            transfer: the output transfer of the model; None if it is not known.
        """
        finding = transfer_detection.resolve(
            self.mark, self.a.shape[-1] if self.features == -1 else 0
        )
        consumer = finding.consumer
        ends = consumer is None or MODEL_OUTPUT in consumer.consumers
        return finding.is_output and (ends or finding.transfer == self._output_transfer(transfer))

    def sampled_gradient(self, transfer: Transfer | None, generator: torch.Generator) -> Tensor:
        """Return ∂L/∂a for labels drawn from the model's prediction, in the shape of ``a``.

        Args:
            transfer: the output transfer of the model; None counts as linear.
            generator: the source of random numbers, on the device of ``a``.
        """
        transfer = self._output_transfer(transfer)
        a = self.a.detach().movedim(self.features, -1)
        found = sampled_output_gradient(transfer or Linear(), a, generator)
        return found.movedim(-1, self.features)

    def _output_transfer(self, transfer: Transfer | None) -> Transfer | None:
        """Return the transfer that the user gave for this layer; otherwise that of the model."""
        return self.layer.transfer if self.layer and self.layer.explicit else transfer


class LabelSampling:
    """Draws labels in the forward passes of one model and sends their gradients back to its layers.

    Args:
        output_transfer: the transfer inside the loss, which says what distribution the model predicts.
    """

    def __init__(self, output_transfer: Transfer | None) -> None:
        self.seed: int | None = None  # seed of labels in the next forward pass; None draws none
        self.outputs: list[LayerOutput] | None = None  # outputs in the running forward pass
        self.are_sent_back = False  # the running backward pass is that of drawn labels
        self._output_transfer = output_transfer

    def draw_before(self, step: int | None) -> None:
        """Draw labels in every forward pass before a step.

        Args:
            step: the number of the step, from which the seeds of the labels follow; None draws none.
        """
        self.seed = None if step is None else step * 1000

    def send_back(self, outputs: Sequence[LayerOutput], processes: Any) -> None:
        """Draw labels from a forward pass's outputs and send their gradients back to every layer.

        Args:
            outputs: the outputs of all layers in the forward pass.
            processes: the process group that averages gradients; None for a single process.

        Raises:
            RuntimeError: if the model does not end in the output of a layer.
        """
        assert self.seed is not None
        seed = self.seed
        if processes is not None:  # each process draws labels of its own
            seed += 7919 * torch.distributed.get_rank(processes)
        self.are_sent_back = True
        try:
            send_sampled_gradients(outputs, self._output_transfer, seed)
        finally:
            self.are_sent_back = False
        self.seed += 1


def send_sampled_gradients(
    outputs: Sequence[LayerOutput], transfer: Transfer | None, seed: int
) -> None:
    """Send the gradients of sampled labels back to every layer; no parameter's ``.grad`` changes.

    Args:
        outputs: the outputs of all layers in one forward pass.
        transfer: the output transfer, which says what distribution the model predicts.
        seed: the seed of the random labels.

    Raises:
        RuntimeError: if the model does not end in the output of a layer.
    """
    # The last parameter is the bias, if there is one. Its gradient is a sum over rows, which is
    # cheaper than the matrix product of a weight gradient.
    wanted = [call.layer.trained[-1] for call in outputs if call.layer and call.layer.trained]
    if not wanted:
        return
    last = [call for call in outputs if call.predicts(transfer)]
    if not last:
        raise RuntimeError(
            "Labels are drawn from the output of the model's last Linear layer, but the model ends "
            "in another operation. Use a variant and a regularizer that need no Fisher matrix."
        )
    generator = seeded(last[0].a.device, seed)
    torch.autograd.grad(
        [call.a for call in last],
        wanted,
        [call.sampled_gradient(transfer, generator) for call in last],
        retain_graph=True,
        allow_unused=True,
    )
