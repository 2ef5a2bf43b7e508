"""A module hook that keeps no object alive, does nothing in copies, and is traced by torch.compile.

The registry through which compiled graphs find the hooks of a module is here too. What the hooks do
is in ``hooks.py``; what they do in compiled graphs is in ``torch_compile.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from threading import RLock
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_locoprop.recording import function_transforms
from torch_locoprop.recording.local_layer import TRANSFORMED

if TYPE_CHECKING:
    from torch_locoprop.recording.hooks import ModelHooks

serials = itertools.count()
_watchers: weakref.WeakSet[ModelHooks] = weakref.WeakSet()  # all ModelHooks that are alive
_WATCHERS = RLock()  # a set that one thread adds to cannot be gone through by another
_hooks: weakref.WeakValueDictionary[str, WeakHook] = weakref.WeakValueDictionary()


class WeakHook:
    """A hook on a module or parameter that calls a method of its owner.

    The owner is a :class:`~.hooks.ModelHooks` or, on a loss, a :class:`~.loss_terms.LossTerms` or a
    :class:`~.loss_inputs.LossInputs`.

    The hook holds its owner weakly. ``copy.deepcopy(model)`` makes a model without the hook. A model
    that was saved whole has the ``__exit__`` of a ``contextlib.nullcontext`` in its place. That returns
    None for any arguments, and the file loads where this package is not installed.

    Args:
        owner: the object whose method is called.
        method: the name of the method.
        module: the module that the hook is on.
    """

    def __init__(
        self, owner: Any = None, method: str = "", module: nn.Module | None = None
    ) -> None:
        self._owner = weakref.ref(owner) if owner is not None else lambda: None
        self._module = weakref.ref(module) if module is not None else lambda: None
        self._method = method
        self._key = str(next(serials))  # a string: torch.compile treats numbers as variables
        _hooks[self._key] = self

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            from torch_locoprop.recording import torch_compile

            if torch_compile.is_exporting():
                return None
            if not torch_compile.needs_python(self._key):
                return torch_compile.trace(self._key, self._method, args)
            return torch_compile.as_python(self.run, *args)
        return self.run(*args)

    def run(self, *args: Any) -> Any:
        """Call the owner's method; do nothing without an owner, or in ``torch.jit.trace``."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return None
        owner = self._owner()
        return None if owner is None else getattr(owner, self._method)(*args)

    @property
    def __name__(self) -> str:  # torch.jit.script reads it when it compiles the hook
        raise AttributeError(
            "torch.jit.script cannot compile LocoProp's hooks, which a model has while its optimizer "
            "exists. Script a copy of the model, copy.deepcopy(model), delete the optimizer first, or "
            "use torch.export or torch.jit.trace."
        )

    @property
    def is_inert(self) -> bool:
        """True if the hook does nothing: its owner was deleted, or the hook is a copy."""
        return self._owner() is None

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[Any, Any]) -> WeakHook:
        """Return an inert hook, which is removed at the end of ``copy.deepcopy``."""
        copy = memo.get(id(self._module()))  # the copy of the module, whose hooks are being copied
        if copy is not None:
            memo.setdefault(_CLEANER, _Cleaner()).modules.append(copy)
        return WeakHook()


_CLEANER = "torch_locoprop cleaner"  # key in the memo of copy.deepcopy


class _Cleaner:
    """Removes inert hooks from copied modules once the memo of ``copy.deepcopy`` is deleted."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    def __del__(self) -> None:
        for module in self.modules:
            if "_forward_hooks" in vars(module):  # a copy that failed has none
                remove_inert(module)


def hook_for(owner: Any, method: str, module: nn.Module) -> WeakHook:
    """Return a :class:`WeakHook` whose ``__call__`` has its own code object.

    ``torch.compile`` caches a function's versions by its code object and stops after eight versions. A
    shared code object would therefore serve at most eight models.

    Args:
        owner: the object whose method is called.
        method: the name of the method.
        module: the module that the hook is on.
    """
    call = WeakHook.__call__
    code = call.__code__.replace()
    own = FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
    kind: type[WeakHook] = type("WeakHook", (WeakHook,), {"__call__": own})
    return kind(owner, method, module)


def remove_inert(module: nn.Module) -> None:
    """Remove inert hooks from a module, and the ``nullcontext`` methods in saved models."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            was_saved = isinstance(getattr(hook, "__self__", None), contextlib.nullcontext)
            if was_saved or (isinstance(hook, WeakHook) and hook.is_inert):
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)


def watch(hooks: ModelHooks) -> None:
    """Add new :class:`~.hooks.ModelHooks` to those that are alive."""
    with _WATCHERS:
        _watchers.add(hooks)


def watchers() -> list[ModelHooks]:
    """Return all :class:`~.hooks.ModelHooks` that are alive, of the models of all threads."""
    with _WATCHERS:
        return list(_watchers)


# ---- for compiled graphs -------------------------------------------------------------------------


def watchers_of(module: nn.Module) -> list[ModelHooks]:
    """Return all :class:`~.hooks.ModelHooks` that watch a module, the oldest first."""
    return sorted((each for each in watchers() if each.watches(module)), key=lambda w: w.serial)


def hooked_module(key: str) -> nn.Module | None:
    """Return the module that the hook with this key is on; None if the hook is inert."""
    hook = _hooks.get(key)
    return None if hook is None or hook.is_inert else hook._module()


def role(key: str) -> str:
    """Return what the hook with this key does when ``torch.compile`` traces it.

    If several hooks are on one module, the oldest acts for all.

    Returns:
        "tap": insert the operator that records the layer's call. "search": search for transfers only.
        "python": run as Python, with a graph break. "nothing": return at once.
    """
    hook, module = _hooks.get(key), hooked_module(key)
    if hook is None or module is None or hook._method == "after_loss":
        return "nothing"
    owner = hook._owner()
    assert owner is not None
    if function_transforms.innermost() is not None:
        if hook._method == "after_layer" and module in owner.layers:
            owner.layers[module].obstacle = TRANSFORMED
        return "nothing"
    if any("fisher" in layer.needs for layer in owner.layers.values()):
        return "python"  # labels are drawn from the model's output in the forward pass
    if hook._method != "after_layer":
        return "search"
    on_module = watchers_of(module)
    if on_module[0] is not owner:
        return "nothing"
    records = [each.layers[module] for each in on_module if module in each.layers]
    replaced = [layer.notice_new_forward() for layer in records]
    taps = any(layer.trained for layer in records) and not any(replaced)
    return "tap" if taps else "search"


def mark_compiled(key: str) -> None:
    """Mark all layers of a hook's owner as compiled, so that the summary reports the graph breaks."""
    hook = _hooks.get(key)
    owner = None if hook is None else hook._owner()
    if owner is not None:
        for layer in owner.layers.values():
            layer.compiled = True
