"""The mathematics of LocoProp as functions of tensors, for engines that own their training loop.

All functions are pure: they change no argument, keep nothing, and do not wait for a device. The
functions take stacked matrices of any floating dtype, and compile with
``torch.compile(fullgraph=True)``. The layout is the same in all of them:

- ``grad``, ``[..., d, n]``: the gradient of a weight W, or of the joint matrix ``[W b]``, whose last
  column is the bias.
- ``gram``: ``C = XᵀX`` of the layer's input rows X, which end with a one for the joint matrix. It is
  dense ``[..., n, n]``, block-diagonal ``[..., b, n/b, n/b]`` or diagonal ``[..., n]``. Its number of
  dimensions says which: as many as those of ``grad``, one more, or one less. Leading dimensions are
  always written out; they have the sizes of those of ``grad``, or 1.
- The displacement that a function returns has the shape and the dtype of ``grad`` and is **added** to
  the weights.
- ``state``: None at first, then what the last call returned, a dictionary of tensors.
- Numbers mean what they mean in :class:`torch_locoprop.LocoProp`. A tensor of the shape of the leading
  dimensions gives each matrix a number of its own.

Half precision is computed in float32, in which states are kept, too. Autocast has no effect on what is
computed. On a GPU, products with C have all digits of float32 even if TF32 is allowed, except in
compiled code.

:class:`InputGram` records C while an engine runs its forward passes, and :func:`as_matrix` and
:func:`from_matrix` convert between a layer's tensors and its matrix.
"""

from torch_locoprop.functional.closed_forms import closed_form, polar, spectral
from torch_locoprop.functional.input_gram import InputGram
from torch_locoprop.functional.layer_matrix import as_matrix, from_matrix
from torch_locoprop.functional.local_iterations import locoprop_m, locoprop_s

__all__ = [
    "InputGram",
    "as_matrix",
    "closed_form",
    "from_matrix",
    "locoprop_m",
    "locoprop_s",
    "polar",
    "spectral",
]
