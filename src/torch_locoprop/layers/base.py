"""The interface of a layer kind, and the registry of all kinds.

A layer kind is the adapter between an ``nn.Module`` and its linear map (``paper/linear_map.py``). It
knows the shapes of the module's tensors and of what was recorded, and has no formula. To add one, write
a file in this package with a class that has these methods and a factory marked ``@serves(TheModule)``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_locoprop.paper.linear_map import LinearMap


class LayerKind(Protocol):
    """The adapter of one kind of module. Rows are samples × positions, features last.

    In a local problem the weight is a matrix ``[d, n]``, whatever its shape in the module. Groups of a
    convolution are a leading dimension of everything: weight ``[G, d/G, n]``, rows ``[G, rows, d/G]``.

    Three more members are optional. If the first dimension of the module's weight is not the d
    outputs, the kind has an attribute ``d``. If it is, in weight and bias, the kind may have a method
    ``with_outputs(d)``, which returns the kind of a layer with d of the outputs. If the kind reads
    other attributes of the module than its tensors, their names are in ``geometry``.
    """

    @property
    def kind(self) -> str:
        """The name of the kind, as ``summary()`` shows it."""
        ...

    @property
    def features(self) -> int:
        """The dimension of recorded tensors that holds the features: -1 or 1."""
        ...

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the tensors that the module's ``forward`` takes, in its order.

        Of several tensors a copy is recorded, joined along the last dimension: they have their
        features last and agree in all other dimensions.
        """
        ...

    @property
    def linear_map(self) -> LinearMap:
        """The products of the layer, for the local problem."""
        ...

    def refuses(self, module: nn.Module) -> str | None:
        """Return why this module has no local problem, or None if it has one."""
        ...

    def matrix(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter, or a tensor of its shape, as the local problem has it.

        Args:
            name: "weight" or "bias".
            tensor: the parameter, its gradient or its state.
        """
        ...

    def restored(self, name: str, matrix: Tensor, like: Tensor) -> Tensor:
        """Return a tensor of the local problem in the module's shape; the inverse of :meth:`matrix`."""
        ...

    def collect(self, inputs: Sequence[Tensor], outputs: Sequence[Any], like: Tensor) -> Any:
        """Return the inputs of all calls in the form that the linear map takes.

        Args:
            inputs: the recorded input of each call.
            outputs: the shape of each call's output.
            like: the weight, whose dtype the result has.
        """
        ...

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a recorded output, or its gradient, as ``[rows, features]``."""
        ...

    def take(self, tensor: Tensor, samples: Tensor) -> Tensor:
        """Return some samples of a recorded tensor: rows, or images with all their positions."""
        ...

    def positions(self, output: Sequence[int]) -> int:
        """Return the number of rows that each sample of an output of this shape has."""
        ...


Factory = Callable[[Any], LayerKind]
F = TypeVar("F", bound=Factory)

FORWARDS = frozenset({"forward", "_conv_forward"})  # functions that decide what a layer computes

_FACTORIES: dict[str, Factory] = {}  # factories by full name of the module's class


def serves(module: type[nn.Module] | str) -> Callable[[F], F]:
    """Register the decorated function as the one that makes the layer kind of a module.

    Args:
        module: the class, or its full name if its package should not be imported here.
    """

    def register(factory: F) -> F:
        _FACTORIES[module if isinstance(module, str) else _full_name(module)] = factory
        return factory

    return register


def layer_kind(module: nn.Module) -> LayerKind | None:
    """Return the kind that serves modules of this class or of its nearest base; None if none does."""
    for cls in type(module).__mro__:
        factory = _FACTORIES.get(_full_name(cls))
        if factory is not None:
            return factory(module)
    return None


def call_inputs(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the tensors of a call that :attr:`LayerKind.arguments` names.

    A subclass with a forward of its own may take other arguments; then return all tensors among them.
    """
    named: list[Any] = [
        args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)
    ]
    if all(isinstance(each, Tensor) for each in named):
        return named
    return _tensors([*args, *kwargs.values()])


def _tensors(values: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts, by code that torch.compile can trace."""
    found: list[Tensor] = []
    for value in list(values.values()) if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple, dict)):
            found += _tensors(value)
    return found


def joined_inputs(inputs: Sequence[Tensor]) -> Tensor:
    """Return what is recorded of a call: its one input, or several joined along the features."""
    if len(inputs) == 1:
        return inputs[0]
    return torch.cat([tensor.detach() for tensor in inputs], dim=-1)


def _was_replaced(module: type[nn.Module], method: str) -> bool:
    """Return True if a method of a class is not from the file of the class: other code replaced it."""
    cls = next(each for each in module.__mro__ if method in vars(each))
    home = sys.modules.get(cls.__module__)
    if home is None or getattr(home, cls.__name__, None) is not cls:
        return False  # the file of the class is not known
    return getattr(vars(cls)[method], "__globals__", None) is not vars(home)


def own_forward(module: nn.Module, *known: Any, method: str = "forward") -> str | None:
    """Return a reason if the module's ``forward`` is none of those that are known.

    Args:
        module: the module.
        known: the functions that compute what the local problem has.
        method: the name of another method to check instead, which ``forward`` calls.
    """
    kind = type(module)
    if getattr(kind, method) in known and not (is_patched(module) or _was_replaced(kind, method)):
        return None
    return f"{kind.__name__} has a {method} of its own"


def is_patched(module: nn.Module) -> bool:
    """Return True if a function was put on the module itself that replaces its class's forward."""
    return not FORWARDS.isdisjoint(vars(module))


def unusual_tensors(module: nn.Module) -> str | None:
    """Return a reason if the module's tensors are not just a plain, real weight and a bias."""
    own = module._parameters
    weight = own.get("weight")
    for name in ("weight", "bias"):  # a bias may be None
        hidden = name in vars(module) or hasattr(type(module), name)
        if hidden or name not in own:
            return f"its {name} is computed (parametrized), not a parameter"
    if weight is None:
        return "it has no weight"
    bias = own["bias"]
    if weight.dim() < 2 or (bias is not None and bias.dim() != 1):
        return (
            "its weight or bias is flattened, as shards of FSDP are, or has another unusual shape"
        )
    if weight.is_complex():
        return "local problems are real, and its weight is complex"
    if is_traceable_wrapper_subclass(weight) and not is_distributed(weight):
        return f"its weight is a {type(weight).__name__}, sharded or quantized, not a plain tensor"
    more = [name for name, p in own.items() if p is not None and name not in ("weight", "bias")]
    return f"it has more parameters than weight and bias: {', '.join(more)}" if more else None


def is_distributed(tensor: Tensor) -> bool:
    """Return True for a DTensor; whether it has a local problem is decided in ``model_scan.py``."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
