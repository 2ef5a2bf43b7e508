"""The meaning of each kind of ``nn.Module`` for the mathematics, one file for each layer kind.

Every file of this package is imported here and registers its kind with :func:`~.base.serves`, so a new
kind needs no other edit. The only formulas in this package are the products of a layer's linear map.
"""

from importlib import import_module
from pkgutil import iter_modules

from torch_locoprop.layers.base import LayerKind, layer_kind

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")

__all__ = ["LayerKind", "layer_kind"]
