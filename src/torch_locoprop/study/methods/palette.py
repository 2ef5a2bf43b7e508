"""The colour of each method, the same in every figure and page. Ours are blue, BackProp's are warm."""

from __future__ import annotations

COLOURS = {
    "locoprop-m": "#0b5fa5",
    "locoprop-s": "#4fb3d9",
    "pocoprop-m": "#2f3e9e",
    "pocoprop-s": "#7f8fd6",
    "proxprop": "#13807a",
    "natural-s": "#5fbfae",
    "exact-s": "#00a3a3",
    "exact-m": "#3f6fd1",
    "exact-s-muon": "#001f5c",
    "sgd": "#a08b6c",
    "momentum": "#b5651d",
    "nesterov": "#8a4b2a",
    "adagrad": "#d98880",
    "rmsprop": "#c8401a",
    "adam": "#eaa221",
    "kfac": "#6a3d9a",
    "shampoo": "#b64fa8",
    "muon": "#3d8b37",
    "soap": "#8fae1b",
    "psgd": "#6b7a2a",
}

OTHERS = ("#555555", "#9c755f", "#bab0ac", "#86bcb6", "#e15759", "#499894")


def colour(method: str) -> str:
    """Return the method's colour as #rrggbb; `kfac@10` has that of `kfac`, others one of their own."""
    base = method.partition("@")[0]
    return COLOURS.get(base) or OTHERS[sum(map(ord, base)) % len(OTHERS)]
