"""The code that hooks of :class:`~.input_gram.InputGram` run while ``torch.compile`` traces them.

A traced hook inserts an operator that counts the rows when the compiled graph runs. Importing this
module imports the compiler, so only traced hooks import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import assume_constant_result

from torch_locoprop.functional import input_gram
from torch_locoprop.layers.base import call_inputs, joined_inputs


def trace(key: str, arguments: tuple[str, ...], args: tuple[Any, ...]) -> Tensor | None:
    """Insert the operator behind a layer whose output requires a gradient.

    Args:
        key: the key of the hook.
        arguments: names of the layer's input arguments.
        args: what PyTorch passes to the hook.

    Returns:
        The output of the layer plus the operator's zero, so that no compiler leaves the operator out.
    """
    _, inputs, options, out = args
    if not _records(key) or not out.requires_grad:
        return None
    x = joined_inputs(call_inputs(arguments, inputs, options)).detach()
    zero = torch.ops.torch_locoprop.count_rows(x, list(out.shape), key)
    return out + zero  # type: ignore[no-any-return]


@assume_constant_result  # type: ignore[untyped-decorator]
def _records(key: str) -> bool:
    """Return True if a hook has a recorder, and the model is not being exported."""
    hook = input_gram.hooks.get(key)
    return hook is not None and not hook.is_inert and not torch.compiler.is_exporting()


@torch.library.custom_op(
    "torch_locoprop::count_rows", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _count_rows(x: Tensor, output: Sequence[int], key: str) -> Tensor:
    """Count the rows of a layer's call and return zero."""
    hook = input_gram.hooks.get(key)
    if hook is not None:
        hook.count(x, output)
    return x.new_zeros(())


@_count_rows.register_fake
def _(x: Tensor, output: Sequence[int], key: str) -> Tensor:
    return x.new_empty(())
