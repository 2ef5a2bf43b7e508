"""Convolutions of one to three dimensions and their transposes.

Every output position of every sample is a row, ``a[row, j] = ⟨W[j], patch(row)⟩ + b[j]``, with the
weight as a matrix ``[d, n]``, n = input channels × kernel positions. The patches are never formed for
the local iterations: ``X Wᵀ`` is the convolution itself, and ``δᵀX`` is its weight gradient. They are
unfolded for ``XᵀX``, some samples at a time, and for closed forms that need all rows.

Groups are problems of their own, with inputs and outputs of their own, and so become a leading
dimension: weight ``[G, d/G, n]``, bias ``[G, d/G]``, rows ``[G, rows, d/G]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_locoprop.layers.base import own_forward, serves, unusual_tensors
from torch_locoprop.paper.linear_map import with_ones
from torch_locoprop.paper.tensors import Tensors

_FORWARDS = (
    *(nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward),
    *(nn.ConvTranspose1d.forward, nn.ConvTranspose2d.forward, nn.ConvTranspose3d.forward),
)
_CONVOLUTIONS = (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)
AT_ONCE = 2**22  # numbers in the patches that are unfolded at a time
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Images:
    """The inputs of one call ``[N, C, *positions]``, padded where the convolution does not pad."""

    x: Tensor
    output_padding: tuple[int, ...]
    size: tuple[int, ...]  # positions of the output

    @property
    def rows(self) -> int:
        """The number of output positions of all samples."""
        return len(self.x) * int(torch.Size(self.size).numel())


@dataclass(frozen=True)
class ConvMap:
    """The linear map of a convolution; ``x`` is a tuple of :class:`Images`, one for each call."""

    shape: tuple[int, ...]  # shape of the weight in the module
    d: int  # output channels
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    holds_rows: ClassVar[bool] = False

    def forward(self, x: tuple[Images, ...], weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # A process may have none of the outputs, and PyTorch has no such convolution.
        if self.d == 0 or not x:
            rows = sum(images.rows for images in x)
            return weight.new_empty(*weight.shape[:-2], rows, weight.shape[-2])
        flat = None if bias is None else bias.reshape(-1)
        return _joined([self.rows(self._convolved(each, self.kernel(weight), flat)) for each in x])

    def weight_grad(self, x: tuple[Images, ...], delta: Tensor) -> Tensors:
        if self.d == 0:
            return {"weight": delta.new_empty(0, self.n), "bias": delta.sum(-2)}
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
        return {"weight": self.matrix(total).contiguous(), "bias": delta.sum(-2)}

    def inputs(self, x: tuple[Images, ...], weight: bool, bias: bool) -> Tensor:
        """Return the patches ``[rows, n]`` or ``[G, rows, n]``."""
        of_each = self._picked if self.transposed else self._unfolded
        return with_ones(_joined([of_each(images) for images in x]), weight, bias)

    def row_blocks(self, x: tuple[Images, ...]) -> Iterator[Tensor]:
        """Yield the patches of some samples at a time: those of all take n/C times the memory of x."""
        for images in x:
            for some in torch.split(images.x, max(AT_ONCE // self._numbers(images), 1)):
                yield self.inputs((replace(images, x=some),), True, False)

    # ---- some of the outputs, images of several processes ------------------------------------------

    def with_outputs(self, d: int) -> ConvMap | None:
        """Return the map of a layer with d of the outputs; None for groups and transposes."""
        if self.groups > 1 or self.transposed:
            return None
        return replace(self, d=d, shape=(d, *self.shape[1:]))

    def packed(self, x: tuple[Images, ...]) -> tuple[list[list[int]], Tensor]:
        """Return images as integers, 2 + 3k of each call, and their numbers as one vector.

        The integers of a call are the shape of its images in k dimensions, the output padding, and the
        size of the output.
        """
        sizes = [[*each.x.shape, *each.output_padding, *each.size] for each in x]
        return sizes, torch.cat([each.x.reshape(-1) for each in x])

    def unpacked(self, sizes: Sequence[Sequence[int]], numbers: Tensor) -> tuple[Images, ...]:
        """Return images from their integers and numbers; the inverse of :meth:`packed`."""
        k = len(self.stride)
        known = [tuple(call) for call in sizes]
        parts = torch.split(numbers, [int(torch.Size(call[: 2 + k]).numel()) for call in known])
        return tuple(
            Images(part.reshape(call[: 2 + k]), call[2 + k : 2 + 2 * k], call[2 + 2 * k :])
            for part, call in zip(parts, known, strict=True)
        )

    # ---- shapes ----------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """The number of inputs of a row: input channels of a group × kernel positions."""
        channels = self.shape[0] // self.groups if self.transposed else self.shape[1]
        return channels * int(torch.Size(self.shape[2:]).numel())

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a weight ``[d, C/G, *k]``, or transposed ``[C, d/G, *k]``, as ``[(G,) d/G, n]``."""
        weight = weight.reshape(self.groups, -1, *weight.shape[1:])
        if self.transposed:
            weight = weight.transpose(1, 2)
        return weight.flatten(2) if self.groups > 1 else weight[0].flatten(1)

    def kernel(self, matrix: Tensor, outputs: int | None = None) -> Tensor:
        """Return a matrix as the weight that convolves, with ``outputs`` channels in each group."""
        kernel = self.shape[2:]
        channels = self.n // int(torch.Size(kernel).numel())
        outputs = self.d // self.groups if outputs is None else outputs
        weight = matrix.reshape(self.groups, outputs, channels, *kernel)
        return (weight.transpose(1, 2) if self.transposed else weight).flatten(0, 1)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return an output ``[N, d, *positions]`` as ``[rows, d]``, or ``[G, rows, d/G]``."""
        if tensor.dim() == len(self.stride) + 1:  # one sample without a batch dimension
            tensor = tensor.unsqueeze(0)
        rows = tensor.movedim(1, -1).flatten(0, -2)
        if self.groups == 1:
            return rows
        return rows.reshape(len(rows), self.groups, rows.shape[-1] // self.groups).transpose(0, 1)

    def _as_output(self, images: Images, rows: Tensor) -> Tensor:
        """Return the rows of one call as its output; the inverse of :meth:`rows`."""
        if self.groups > 1:
            rows = rows.transpose(0, 1).flatten(1)
        return rows.reshape(len(images.x), *images.size, self.d).movedim(-1, 1)

    # ---- products --------------------------------------------------------------------------------

    def _convolved(self, images: Images, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(
            images.x, weight, bias, self.stride, self.padding, self.dilation,
            self.transposed, images.output_padding, self.groups,
        )  # fmt: skip

    def _picked(self, images: Images) -> Tensor:
        """Return the patches of a transposed convolution: what unit vectors as weights pick."""
        n = self.n
        units = torch.eye(n, dtype=images.x.dtype, device=images.x.device).repeat(self.groups, 1)
        return self.rows(self._convolved(images, self.kernel(units, outputs=n), None))

    def _unfolded(self, images: Images) -> Tensor:
        """Return the patches of an ordinary convolution, which are parts of the images, by a copy."""
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

    def _numbers(self, images: Images) -> int:
        """Return how many numbers the patches of one sample have together."""
        return self.groups * int(torch.Size(images.size).numel()) * self.n


@dataclass(frozen=True)
class ConvLayer:
    """The adapter of ``nn.Conv1d/2d/3d`` and ``nn.ConvTranspose1d/2d/3d``."""

    kind: str  # the module's class
    linear_map: ConvMap
    output_padding: tuple[int, ...]
    before: tuple[int, ...] = ()  # padding done before the convolution, in the order of F.pad
    mode: str = "constant"  # mode of the padding before
    features = 1
    arguments = ("input",)
    geometry = ("stride", "padding", "dilation", "groups", "padding_mode", "output_padding")

    @property
    def d(self) -> int:
        """The number of output channels."""
        return self.linear_map.d

    def refuses(self, module: nn.Module) -> str | None:
        reason = own_forward(module, *_FORWARDS)
        if not self.linear_map.transposed:
            reason = reason or own_forward(module, *_CONVOLUTIONS, method="_conv_forward")
        return reason or unusual_tensors(module)

    def matrix(self, name: str, tensor: Tensor) -> Tensor:
        if name == "weight":
            return self.linear_map.matrix(tensor)
        groups = self.linear_map.groups
        return tensor if groups == 1 else tensor.reshape(groups, -1)

    def restored(self, name: str, matrix: Tensor, like: Tensor) -> Tensor:
        return matrix.reshape(like.shape) if name == "bias" else self.linear_map.kernel(matrix)

    def collect(
        self, inputs: Sequence[Tensor], outputs: Sequence[Any], like: Tensor
    ) -> tuple[Images, ...]:
        return tuple(
            self._images(x.to(like.dtype), size) for x, size in zip(inputs, outputs, strict=True)
        )

    def _images(self, x: Tensor, shape: Sequence[int]) -> Images:
        dimensions = len(self.linear_map.stride)
        if x.dim() == dimensions + 1:  # one sample without a batch dimension
            x = x.unsqueeze(0)
        if self.before:
            x = F.pad(x, self.before, mode=self.mode)
        if x.dim() in _CHANNELS_LAST:  # the rows of the output are then a view of it
            x = x.contiguous(memory_format=_CHANNELS_LAST[x.dim()])
        size = tuple(shape[-dimensions:])
        return Images(x, self._output_padding(x, size), size)

    def _output_padding(self, x: Tensor, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the output padding with which a transposed convolution has outputs of this size."""
        own = self.linear_map
        if not own.transposed:
            return self.output_padding
        each = zip(
            x.shape[2:], size, own.shape[2:], own.stride, own.padding, own.dilation, strict=True
        )
        return tuple(s - ((i - 1) * st - 2 * p + di * (k - 1) + 1) for i, s, k, st, p, di in each)

    def rows(self, tensor: Tensor) -> Tensor:
        return self.linear_map.rows(tensor)

    def take(self, tensor: Tensor, samples: Tensor) -> Tensor:
        return tensor[samples]

    def with_outputs(self, d: int) -> ConvLayer | None:
        """Return the kind of a layer with d of the outputs; None for groups and transposes."""
        narrower = self.linear_map.with_outputs(d)
        return None if narrower is None else replace(self, linear_map=narrower)

    def positions(self, output: Sequence[int]) -> int:
        return int(torch.Size(output[-len(self.linear_map.stride) :]).numel())


@serves(nn.modules.conv._ConvNd)
def convolution(module: nn.modules.conv._ConvNd) -> ConvLayer:
    """Return the layer kind of a convolution, from its geometry.

    The weight itself is not read: if it is computed, as with ``spectral_norm``, reading may change it.
    """
    channels = (module.out_channels, module.in_channels)
    rows, columns = reversed(channels) if module.transposed else channels
    same = isinstance(module.padding, str)
    inside = not same and module.padding_mode == "zeros"
    return ConvLayer(
        kind=type(module).__name__.removeprefix("FSDP"),  # fully_shard adds the prefix
        linear_map=ConvMap(
            shape=(rows, columns // module.groups, *module.kernel_size),
            d=module.out_channels,
            stride=tuple(module.stride),
            padding=tuple(module.padding) if inside else (0,) * len(module.stride),  # type: ignore[arg-type]
            dilation=tuple(module.dilation),
            groups=module.groups,
            transposed=module.transposed,
        ),
        output_padding=tuple(module.output_padding),
        before=() if inside else tuple(module._reversed_padding_repeated_twice),
        mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
    )


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-2)
