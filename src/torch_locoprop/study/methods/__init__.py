"""The methods that the study compares, and the registry that names them."""

from torch_locoprop.study.methods.registry import Method, get, names, register

__all__ = ["Method", "get", "names", "register"]
