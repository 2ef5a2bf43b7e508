"""Convolutions of one to three dimensions and their transposes.

Every output position of every sample is a row, ``a[row, j] = ⟨W[j], patch(row)⟩ + b[j]``, with the
weight as a matrix ``[d, n]``, n = input channels × kernel positions. The patches are never formed for
the local iterations: ``X Wᵀ`` is the convolution itself, and ``δᵀX`` is its weight gradient. Only for
``XᵀX``, where that is smaller than the images, some are unfolded at a time, and for a closed form with
rows all of them.

Groups are problems of their own, with inputs and outputs of their own, and so become a leading
dimension: weight ``[G, d/G, n]``, bias ``[G, d/G]``, rows ``[G, rows, d/G]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_locoprop.layers.linear import refuses_tensors, with_ones
from torch_locoprop.paper.gram import Gram

_FORWARDS = (
    *(nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward),
    *(nn.ConvTranspose1d.forward, nn.ConvTranspose2d.forward, nn.ConvTranspose3d.forward),
)
AT_ONCE = 2**22  # numbers in patches
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Images:
    """The inputs of one call ``[N, C, *positions]``, padded where convolving does not pad itself."""

    x: Tensor
    output_padding: tuple[int, ...]
    size: tuple[int, ...]  # positions of the output

    @property
    def rows(self) -> int:
        return len(self.x) * int(torch.Size(self.size).numel())


@dataclass(frozen=True)
class ConvLayer:
    """The local problem's view of ``nn.Conv1d/2d/3d`` and ``nn.ConvTranspose1d/2d/3d``."""

    kind: str  # the module's class
    shape: tuple[int, ...]  # of the weight in the module
    d: int  # output channels
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]
    before: tuple[int, ...] = ()  # padding done before the convolution, in the order of F.pad
    mode: str = "constant"  # of that padding
    features = 1

    @classmethod
    def of(cls, module: nn.modules.conv._ConvNd) -> ConvLayer:
        # Not from module.weight: where that is computed, to look at it may change it (spectral_norm).
        channels = (module.out_channels, module.in_channels)
        rows, columns = reversed(channels) if module.transposed else channels
        same = isinstance(module.padding, str)
        inside = not same and module.padding_mode == "zeros"
        before = tuple(module._reversed_padding_repeated_twice)
        return cls(
            kind=type(module).__name__,
            shape=(rows, columns // module.groups, *module.kernel_size),
            d=module.out_channels,
            stride=tuple(module.stride),
            padding=tuple(module.padding) if inside else (0,) * len(module.stride),  # type: ignore[arg-type]
            dilation=tuple(module.dilation),
            groups=module.groups,
            transposed=module.transposed,
            output_padding=tuple(module.output_padding),
            before=() if inside else before,
            mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
        )

    def refuses(self, module: nn.Module) -> str | None:
        if type(module).forward not in _FORWARDS or "forward" in vars(module):
            return f"{type(module).__name__} has a forward of its own"
        return refuses_tensors(module)

    # ---- between the module's shapes and the local problem's ------------------------------------

    def matrix(self, name: str, tensor: Tensor) -> Tensor:
        """Weight ``[d, C/G, *k]``, or transposed ``[C, d/G, *k]``, as ``[d, n]`` or ``[G, d/G, n]``."""
        if name == "bias":
            return tensor if self.groups == 1 else tensor.reshape(self.groups, -1)
        tensor = tensor.reshape(self.groups, -1, *tensor.shape[1:])
        if self.transposed:
            tensor = tensor.transpose(1, 2)
        return tensor.flatten(2) if self.groups > 1 else tensor[0].flatten(1)

    def restored(self, name: str, matrix: Tensor, like: Tensor) -> Tensor:
        if name == "bias":
            return matrix.reshape(like.shape)
        return self._weight(matrix)

    def _weight(self, matrix: Tensor, outputs: int | None = None) -> Tensor:
        """A matrix of so many outputs in a group as the weight that convolves."""
        kernel = self.shape[2:]
        channels = self.shape[0] // self.groups if self.transposed else self.shape[1]
        outputs = outputs or self.d // self.groups
        weight = matrix.reshape(self.groups, outputs, channels, *kernel)
        return (weight.transpose(1, 2) if self.transposed else weight).flatten(0, 1)

    def collect(
        self, inputs: Sequence[Tensor], outputs: Sequence[Any], like: Tensor
    ) -> tuple[Images, ...]:
        return tuple(
            self._images(x.to(like.dtype), size) for x, size in zip(inputs, outputs, strict=True)
        )

    def _images(self, x: Tensor, shape: Sequence[int]) -> Images:
        dimensions = len(self.stride)
        if x.dim() == dimensions + 1:  # one sample without a batch dimension
            x = x.unsqueeze(0)
        if self.before:
            x = F.pad(x, self.before, mode=self.mode)
        if x.dim() in _CHANNELS_LAST:  # the rows of the output are then a view of it
            x = x.contiguous(memory_format=_CHANNELS_LAST[x.dim()])
        size = tuple(shape[-dimensions:])
        return Images(x, self._output_padding(x, size), size)

    def _output_padding(self, x: Tensor, size: tuple[int, ...]) -> tuple[int, ...]:
        """What was added to the output of a transposed convolution to have this size."""
        if not self.transposed:
            return self.output_padding
        kernel = self.shape[2:]
        each = zip(x.shape[2:], size, kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple(s - ((i - 1) * st - 2 * p + di * (k - 1) + 1) for i, s, k, st, p, di in each)

    def count(self, x: tuple[Images, ...]) -> int:
        return sum(images.rows for images in x)

    def rows(self, tensor: Tensor) -> Tensor:
        """``[N, d, *positions]`` as ``[rows, d]``, or ``[G, rows, d/G]``."""
        if tensor.dim() == len(self.stride) + 1:
            tensor = tensor.unsqueeze(0)
        rows = tensor.movedim(1, -1).flatten(0, -2)
        if self.groups == 1:
            return rows
        return rows.reshape(len(rows), self.groups, -1).transpose(0, 1)

    # ---- the operations of the local problem ----------------------------------------------------

    def forward(self, x: tuple[Images, ...], weight: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = None if bias is None else bias.reshape(-1)
        rows = [self.rows(self._convolved(each, self._weight(weight), flat)) for each in x]
        return _joined(rows)

    def _convolved(self, images: Images, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(
            images.x, weight, bias, self.stride, self.padding, self.dilation,
            self.transposed, images.output_padding, self.groups,
        )  # fmt: skip

    def weight_grad(self, x: tuple[Images, ...], delta: Tensor) -> dict[str, Tensor]:
        parts = torch.split(delta, [images.rows for images in x], dim=-2)
        weight = delta.new_empty(self.shape)  # only its shape is read
        total: Tensor | None = None
        for images, part in zip(x, parts, strict=True):
            _, found, _ = torch.ops.aten.convolution_backward.default(
                self._as_output(images, part), images.x, weight, [0],
                self.stride, self.padding, self.dilation, self.transposed,
                images.output_padding, self.groups, [False, True, False],
            )  # fmt: skip
            total = found if total is None else total + found
        assert total is not None
        return {"weight": self.matrix("weight", total).contiguous(), "bias": delta.sum(-2)}

    def _as_output(self, images: Images, rows: Tensor) -> Tensor:
        """The inverse of :meth:`rows` for one call."""
        if self.groups > 1:
            rows = rows.transpose(0, 1).flatten(1)
        return rows.reshape(len(images.x), *images.size, -1).movedim(-1, 1)

    def inputs(self, x: tuple[Images, ...], weight: bool, bias: bool) -> Tensor:
        """The patches ``[rows, n]`` or ``[G, rows, n]``."""
        of_each = self._picked if self.transposed else self._unfolded
        return with_ones(_joined([of_each(images) for images in x]), weight, bias)

    def _picked(self, images: Images) -> Tensor:
        """What unit vectors as weights pick."""
        n = int(torch.Size(self.shape).numel()) // self.d
        units = torch.eye(n, dtype=images.x.dtype, device=images.x.device).repeat(self.groups, 1)
        return self.rows(self._convolved(images, self._weight(units, outputs=n), None))

    def _unfolded(self, images: Images) -> Tensor:
        """The same where the patches are parts of the images, for the work of a copy."""
        around = [size for size in reversed(self.padding) for _ in range(2)]
        patches = F.pad(images.x, around)
        steps = zip(self.shape[2:], self.stride, self.dilation, strict=True)
        for i, (kernel, stride, dilation) in enumerate(steps):  # [N, C, *positions, *kernel]
            whole = patches.unfold(2 + i, dilation * (kernel - 1) + 1, stride)
            patches = whole[..., ::dilation]
        samples, channels, *rest = patches.shape
        by_group = patches.reshape(samples, self.groups, channels // self.groups, *rest)
        positions = len(self.stride)
        by_group = by_group.transpose(0, 1).movedim(2, 2 + positions)
        rows = by_group.flatten(1, 1 + positions).flatten(2)
        return rows if self.groups > 1 else rows[0]

    def take(self, tensor: Tensor, samples: Tensor) -> Tensor:
        return tensor[samples]

    def positions(self, output: Sequence[int]) -> int:
        return int(torch.Size(output[-len(self.stride) :]).numel())

    def products(self, x: tuple[Images, ...], dtype: torch.dtype) -> Gram:
        """From some samples after the others: the patches of all take n/C times the room of x."""
        parts = [
            replace(images, x=some)
            for images in x
            for some in torch.split(images.x, max(AT_ONCE // self._numbers(images), 1))
        ]
        rows = (self.inputs((part,), True, False).to(dtype) for part in parts)
        first, *rest = (Gram.of(each, apart=True) for each in rows)
        return sum(rest, first)

    def _numbers(self, images: Images) -> int:
        """How many the patches of one sample have together."""
        n = int(torch.Size(self.shape).numel()) // self.d
        return self.groups * int(torch.Size(images.size).numel()) * n

    def gram(
        self, x: tuple[Images, ...], d: int, gradients: int, weight: Tensor | None = None
    ) -> Gram | None:
        return None  # the images are there, and their convolutions need no room for patches


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-2)
