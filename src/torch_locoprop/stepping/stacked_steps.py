"""Spectral steps of small layers whose matrices have one shape, taken together as one stack.

A spectral step is about a hundred operations. For a small layer, calling them takes longer than their
arithmetic. Layers of transformers, and of many deep networks, have few shapes: K layers that are
stacked as ``[K, d, n]`` take one step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_locoprop.fast import dispatch
from torch_locoprop.paper.gram import FULL
from torch_locoprop.paper.targets import BackPropTarget
from torch_locoprop.paper.tensors import Tensors, join
from torch_locoprop.solvers import Spectral
from torch_locoprop.solvers.base import Checked, States
from torch_locoprop.stepping.build_problem import Posed

# Entries of a weight up to which stacking saves more time than its copies take.
# benchmarks/spectral_step.py measures it.
LARGEST = 2**14


def stack_of(posed: Posed) -> Hashable:
    """Return a key that is equal for layers whose steps can be stacked; None for a step taken alone."""
    problem, solver, state = posed.problem, posed.method.solver, posed.states.get("weight", {})
    weight, numbers = problem.start.get("weight"), posed.numbers.get("weight")
    if type(solver) is not Spectral or weight is None or numbers is None:
        return None
    if weight.dim() != 2 or weight.numel() > LARGEST:
        return None
    if problem.others is not None or posed.part is not None:
        return None
    if type(problem.target).first_gradient is not BackPropTarget.first_gradient:
        return None
    tensors = [*problem.start.values(), *problem.backprop.values(), *state.values()]
    if not all(type(tensor) is Tensor and tensor.is_cpu for tensor in tensors):
        return None
    settings = numbers, problem.number, problem.products, problem.structure
    kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
    return solver, settings, (*problem.start, *state), *kinds


def solved(layers: Sequence[Posed]) -> list[tuple[Tensors, States]]:
    """Return the new tensors and states of layers with equal keys."""
    problems, one = [each.problem for each in layers], layers[0]
    first, solver, local_steps = one.problem, one.method.solver, one.method.local_steps
    old, columns = one.states["weight"], join(first.start).shape[-1]
    structure = first.structure or FULL
    use = solver.use_of_rows(local_steps, first.number, old, columns, structure=structure)
    squares = None
    if use is not None and use.square:
        dtype = torch.promote_types(first.backprop["weight"].dtype, torch.float32)
        squares = torch.stack([each.square(dtype) for each in problems])
    stack = replace(
        first,
        start=_stacked([each.start for each in problems]),
        backprop=_stacked([each.backprop for each in problems]),
        whole_square=squares,
    )
    states = {"weight": _stacked([each.states["weight"] for each in layers])}
    new, states = dispatch.solve(solver, stack, states, one.numbers, local_steps, "")
    entries = states["weight"]
    finite = dispatch.finite([*new.values(), *entries.values()], len(layers))
    found: list[tuple[Tensors, States]] = []
    for k, each in enumerate(layers):
        state = {key: entry[k] for key, entry in entries.items()}
        if any(key not in old or old[key].shape != e.shape for key, e in state.items()):
            # The optimizer keeps these entries: as views they would keep the whole stack.
            state = {key: entry.clone() for key, entry in state.items()}
        own = Checked({name: tensor[k] for name, tensor in new.items()}, finite[k : k + 1])
        found.append((own, {**each.states, "weight": state}))
    return found


def _stacked(of_layers: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([each[name] for each in of_layers]) for name in of_layers[0]}
