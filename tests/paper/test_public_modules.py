"""``torch_locoprop.transfers``, ``losses``, ... offer the objects of ``torch_locoprop.paper``."""

import importlib
import inspect

import pytest

import torch_locoprop

MODULES = ("transfers", "losses", "targets", "regularizers", "variants")


# Functions of torch_locoprop.transfers that live in a module of their own.
ELSEWHERE = {"bregman": "divergences", "matching_loss": "divergences"}


@pytest.mark.parametrize("name", MODULES)
def test_public_objects_are_those_of_the_paper_package(name: str) -> None:
    public = importlib.import_module(f"torch_locoprop.{name}")
    assert getattr(torch_locoprop, name) is public
    for exported in public.__all__:
        module = importlib.import_module(f"torch_locoprop.paper.{ELSEWHERE.get(exported, name)}")
        assert getattr(public, exported) is getattr(module, exported)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_of_the_paper_module_is_exported(name: str) -> None:
    public = importlib.import_module(f"torch_locoprop.{name}")
    source = importlib.import_module(f"torch_locoprop.paper.{name}")
    defined = {
        key
        for key, value in vars(source).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == source.__name__
        and not key.startswith("_")
    }
    assert defined | set(getattr(source, "__all__", ())) <= set(public.__all__)
