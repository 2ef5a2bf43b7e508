"""A module hook that keeps nothing alive, copies to an inert one, and can be traced by torch.compile.

Here also is the registry through which compiled graphs find the hooks of a module; what traced
hooks do is in ``torch_compile.py``, what ordinary ones do in ``hooks.py``.
"""

from __future__ import annotations

import itertools
import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch_locoprop.recording.hooks import ModelHooks

serials = itertools.count()
watchers: weakref.WeakSet[ModelHooks] = weakref.WeakSet()  # all that live
_hooks: weakref.WeakValueDictionary[str, WeakHook] = weakref.WeakValueDictionary()


class WeakHook:
    """A method of :class:`~.hooks.ModelHooks`, held weakly, as a hook on a module or parameter."""

    def __init__(
        self, owner: ModelHooks | None = None, method: str = "", module: nn.Module | None = None
    ) -> None:
        self._owner = weakref.ref(owner) if owner is not None else lambda: None
        self._module = weakref.ref(module) if module is not None else lambda: None
        self._method = method
        self._key = str(next(serials))  # a string: the compiler takes numbers for variables
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
        """Run the method, as in an ordinary pass."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return None
        owner = self._owner()
        return None if owner is None else getattr(owner, self._method)(*args)

    @property
    def __name__(self) -> str:  # read by torch.jit.script, which compiles hooks
        raise AttributeError(
            "torch.jit.script cannot compile LocoProp's hooks, which a model has while the optimizer "
            "lives, and copies made meanwhile keep. Delete the optimizer first, or use torch.export or "
            "torch.jit.trace."
        )

    @property
    def is_inert(self) -> bool:
        """True if the owner is gone, or the hook is a copy."""
        return self._owner() is None

    def __reduce__(self) -> tuple[type[WeakHook], tuple[()]]:
        return WeakHook, ()


def hook_for(owner: ModelHooks, method: str, module: nn.Module) -> WeakHook:
    """Return a hook whose ``__call__`` has a code object of its own.

    The compiler caches what it made of a function by its code and gives up after eight versions, which
    is how many models could share one code object.
    """
    call = WeakHook.__call__
    code = call.__code__.replace()
    own = FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)
    kind: type[WeakHook] = type("WeakHook", (WeakHook,), {"__call__": own})
    return kind(owner, method, module)


def remove_inert(module: nn.Module) -> None:
    """Remove hooks that do nothing, which copies and reloads of a model carry, from a module."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, WeakHook) and hook.is_inert:
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)


# ---- what compiled graphs ask for ----------------------------------------------------------------


def watchers_of(module: nn.Module) -> list[ModelHooks]:
    """Return all that watch a module, the oldest first."""
    return sorted((each for each in watchers if each.watches(module)), key=lambda w: w.serial)


def hooked_module(key: str) -> nn.Module | None:
    """Return the module on which the hook of this key sits; None if the hook is inert."""
    hook = _hooks.get(key)
    return None if hook is None or hook.is_inert else hook._module()


def role(key: str) -> str:
    """Return what a hook does when it is traced: "nothing", "python", "search" or "tap".

    Where several hooks sit on one module, the first acts for all.
    """
    hook, module = _hooks.get(key), hooked_module(key)
    if hook is None or module is None:
        return "nothing"
    owner = hook._owner()
    assert owner is not None
    if any("fisher" in layer.needs for layer in owner.layers.values()):
        return "python"  # labels are drawn from the model's output in the forward pass
    if hook._method != "after_layer":
        return "search"
    sharing = watchers_of(module)
    if sharing[0] is not owner:
        return "nothing"
    served = [each.layers[module] for each in sharing if module in each.layers]
    return "tap" if any(layer.trained for layer in served) else "search"


def mark_compiled(key: str) -> None:
    """Mark the layers of a hook that breaks a compiled graph, so that the summary says so."""
    hook = _hooks.get(key)
    owner = None if hook is None else hook._owner()
    if owner is not None:
        for layer in owner.layers.values():
            layer.compiled = True
