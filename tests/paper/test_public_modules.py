"""``torch_locoprop.transfers``, ``losses``, ... offer the objects of ``torch_locoprop.paper``."""

import importlib
import inspect

import pytest

import torch_locoprop

MODULES = ("transfers", "losses", "targets", "regularizers", "variants")


@pytest.mark.parametrize("name", MODULES)
def test_public_objects_are_those_of_the_paper_package(name: str) -> None:
    public = importlib.import_module(f"torch_locoprop.{name}")
    source = importlib.import_module(f"torch_locoprop.paper.{name}")
    assert getattr(torch_locoprop, name) is public
    for exported in public.__all__:
        assert getattr(public, exported) is getattr(source, exported)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_class_and_function_is_exported(name: str) -> None:
    public = importlib.import_module(f"torch_locoprop.{name}")
    source = importlib.import_module(f"torch_locoprop.paper.{name}")
    defined = {
        key
        for key, value in vars(source).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == source.__name__
        and not key.startswith("_")
    }
    assert defined <= set(public.__all__)
    assert all(hasattr(public, key) for key in public.__all__)
