"""Spectral steps of small layers whose matrices have one shape, taken together as one stack.

A spectral step is about a hundred operations. For a small layer, calling them takes longer than their
arithmetic, and on a GPU one matrix leaves most of the device idle. Layers of transformers, and of many
deep networks, have few shapes: K layers that are stacked as ``[K, d, n]`` take one step.

On a GPU only steps that renew no inverse are stacked: stacked matrices are factorized by a library that
no CUDA graph can record.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_locoprop.fast import dispatch
from torch_locoprop.paper.gram import FULL
from torch_locoprop.paper.targets import BackPropTarget
from torch_locoprop.paper.tensors import Tensors, join
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.solvers.base import Checked, States
from torch_locoprop.stepping.build_problem import Posed

# Entries of a weight up to which stacking saves more time than its copies take.
# benchmarks/spectral_step.py measures it.
LARGEST = 2**14
LARGEST_ON_GPU = 2**22  # on a GPU: entries of a weight, and of C, up to which layers are stacked
STACK_ON_GPU = 2**25  # entries of all matrices in a stack, which bounds the memory of the copies


def is_small(matrix: Tensor) -> bool:
    """Return True if a weight is a matrix ``[d, n]`` that is small enough for a stack."""
    if matrix.dim() != 2:
        return False
    if matrix.is_cuda:
        return _entries(matrix) <= LARGEST_ON_GPU
    return matrix.is_cpu and matrix.numel() <= LARGEST


def parts(layers: Sequence[LayerRecord]) -> Iterator[Sequence[LayerRecord]]:
    """Yield layers of one shape in parts: on a GPU so many at a time as may be in a stack."""
    weight = layers[0].kind.matrix("weight", layers[0].like)
    most = max(STACK_ON_GPU // _entries(weight), 1) if weight.is_cuda else len(layers)
    for first in range(0, len(layers), most):
        yield layers[first : first + most]


def _entries(matrix: Tensor) -> int:
    """Return the number of entries of a matrix ``[d, n]`` or of its C, whichever has more."""
    d, n = matrix.shape
    return max(d * n, n * n)


def stack_of(posed: Posed) -> Hashable:
    """Return a key that is equal for layers whose steps can be stacked; None for a step taken alone."""
    problem, solver, weight = posed.problem, posed.method.solver, posed.problem.start.get("weight")
    if weight is None or (weight.is_cuda and _squares(posed)):
        return None
    if type(problem.target).first_gradient is not BackPropTarget.first_gradient:
        return None
    state, numbers = posed.states["weight"], posed.numbers["weight"]
    tensors = [*problem.start.values(), *problem.backprop.values(), *state.values()]
    if not all(type(tensor) is Tensor for tensor in tensors):
        return None
    # A tuple looks at the identity of tensors first. `Numbers` may compare values: a host sync.
    rates = numbers.lr, numbers.momentum, numbers.decay
    settings = rates, problem.number, problem.products, problem.structure
    kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
    return solver, settings, (*problem.start, *state), *kinds


def solved(layers: Sequence[Posed]) -> list[tuple[Tensors, States]]:
    """Return the new tensors and states of layers with equal keys."""
    problems, one = [each.problem for each in layers], layers[0]
    first, solver, local_steps = one.problem, one.method.solver, one.method.local_steps
    old, squares = one.states["weight"], None
    if _squares(one):
        dtype = torch.promote_types(first.backprop["weight"].dtype, torch.float32)
        squares = torch.stack([each.square(dtype) for each in problems])
    stack = replace(
        first,
        start=_stacked([each.start for each in problems]),
        backprop=_stacked([each.backprop for each in problems]),
        whole_square=squares,
    )
    used = [key for key in old if squares is not None or key != "gram"]
    given = _stacked([{key: each.states["weight"][key] for key in used} for each in layers])
    new, states = dispatch.solve(solver, stack, {"weight": given}, one.numbers, local_steps, "")
    entries = {k: entry for k, entry in states["weight"].items() if entry is not given.get(k)}
    finite = dispatch.finite([*new.values(), *entries.values()], len(layers))
    found: list[tuple[Tensors, States]] = []
    for k, each in enumerate(layers):
        state = {key: entry[k] for key, entry in entries.items()}
        own = Checked({name: tensor[k] for name, tensor in new.items()}, finite[k : k + 1])
        found.append((own, {**each.states, "weight": {**each.states["weight"], **state}}))
    return found


def _squares(posed: Posed) -> bool:
    """Return True if a layer's step renews C."""
    problem, method = posed.problem, posed.method
    columns, structure = join(problem.start).shape[-1], problem.structure or FULL
    state, local_steps = posed.states["weight"], method.local_steps
    use = method.solver.use_of_rows(
        local_steps, problem.number, state, columns, structure=structure
    )
    return use is not None and use.square


def _stacked(of_layers: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([each[name] for each in of_layers]) for name in of_layers[0]}
