"""For every setting in the table, a value that is allowed and is not the default."""

from typing import Any

from torch_locoprop.config.setting_kinds import Choice, Count, Number, Setting, Switch
from torch_locoprop.config.settings import SETTINGS

_COMPONENTS = {"variant": "locoprop-s", "solver": "adam", "regularizer": "l2"}


def _changed(name: str, setting: Setting) -> Any:
    if isinstance(setting, Number):
        return setting.default / 2 if setting.default else 1e-2
    if isinstance(setting, Count):
        return (setting.default or 3) + 1
    if isinstance(setting, Switch):
        return not setting.default
    if isinstance(setting, Choice):
        return next(choice for choice in setting.choices if choice != setting.default)
    return _COMPONENTS[name]


CHANGED = {name: _changed(name, setting) for name, setting in SETTINGS.items()}
