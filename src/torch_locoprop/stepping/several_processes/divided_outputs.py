"""Local iterations of layers under DDP, with the outputs divided among the processes.

Each process solves the problems of some outputs for the rows of all processes: with XᵀX, which is added
up once, or with all rows, which are gathered once; of a convolution the images are gathered. One
all-gather then brings all new rows of the layer's tensors, and of the solver's state, to all processes.
Without this division, every process solves all outputs with its own rows, and the processes add up a
gradient in each iteration, and the sums of preconditioned iterations over rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, distributed

from torch_locoprop.distributed import communication
from torch_locoprop.distributed.collectives import gathered, of_all, padded_to, row_counts
from torch_locoprop.distributed.ddp import Exchange, SharedFacts
from torch_locoprop.fast import dispatch
from torch_locoprop.layers.conv import ConvMap
from torch_locoprop.paper.gram import Gram, saves_work
from torch_locoprop.paper.linear_map import Dense, LinearMap
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.solvers import FirstOrder, Preconditioned
from torch_locoprop.solvers.base import Solver, States
from torch_locoprop.stepping.build_problem import Posed
from torch_locoprop.stepping.several_processes.layer_part import couples_outputs

# Input features from which on iterations with XᵀX take longer than sending their solution.
# benchmarks/ddp_steps.py measures it.
PAYS_FROM = 128
DIVIDED = "each process solves some of its outputs"


def is_divided(posed: Posed) -> bool:
    """Return True if the processes divide the outputs of a layer among them.

    Only facts that all processes know decide, so that all decide the same.
    """
    problem, method, facts = posed.problem, posed.method, posed.layer.shared_facts
    if not isinstance(problem.others, Exchange) or not isinstance(facts, SharedFacts):
        return False
    solver = method.solver
    iterates = isinstance(solver, FirstOrder) or type(solver) is Preconditioned
    whole_rows = facts.all_have_rows and facts.active == facts.processes
    weight = problem.start.get("weight")
    if not (iterates and whole_rows and method.local_steps > 1):
        return False
    if weight is None or weight.dim() > 2:
        return False
    of_rows = problem.target.needs | problem.regularizer.needs
    if not of_rows <= {"g", "v"} or couples_outputs(posed.layer, method):
        return False
    d, n = weight.shape
    if d < facts.processes:
        return False
    first_order = isinstance(solver, FirstOrder)
    if first_order and not of_rows and _goes_through_gram(problem, facts, method.local_steps):
        return n >= PAYS_FROM
    gathers = facts.equal_rows and not facts.some_have_gram
    if not gathers or _narrower(problem.linear_map, 1) is None:
        return False
    return _gathers_less(posed, facts, d, n)


def _narrower(linear_map: LinearMap, d: int) -> LinearMap | None:
    """Return the map of d of the outputs; None if rows cannot be gathered for some outputs."""
    if isinstance(linear_map, ConvMap):
        return linear_map.with_outputs(d)
    return linear_map if type(linear_map) is Dense else None


def _goes_through_gram(problem: LocalProblem, facts: SharedFacts, local_steps: int) -> bool:
    """Return True if the iterations use XᵀX of all processes."""
    if not problem.loss.is_quadratic(problem.transfer):
        return False
    d, n = problem.start["weight"].shape
    kept = isinstance(problem.x, Gram) or facts.some_have_gram
    has_rows = problem.linear_map.holds_rows
    return kept or (has_rows and saves_work(facts.rows, d, n, local_steps - 1))


def _gathers_less(posed: Posed, facts: SharedFacts, d: int, n: int) -> bool:
    """Return True if sending rows and solutions takes less than sending a gradient per iteration."""
    problem, solver, local_steps = posed.problem, posed.method.solver, posed.method.local_steps
    size, bias = posed.layer.like.element_size(), "bias" in problem.start
    processes, rows = facts.processes, facts.rows // facts.processes
    of_inputs = (rows, n)
    if isinstance(problem.linear_map, ConvMap):
        of_inputs = (1, sum(images.x.numel() for images in problem.x))
    parts = communication.rows_in_ddp(*of_inputs, processes, size)
    for _ in _row_gradients(problem):
        parts = parts.plus(communication.rows_in_ddp(rows, d, processes, size))
    entries = len(solver.row_state)
    parts = parts.plus(communication.outputs_in_ddp(d, n + bias, entries, processes, size))
    if isinstance(solver, FirstOrder):
        added = communication.by_iterations_in_ddp(d, n, bias, local_steps, size)
    else:
        parts = parts.plus(communication.square_in_ddp(n + bias, size))
        added = communication.preconditioned_in_ddp(
            d, n, bias, local_steps, size, slopes=problem.loss.uses_transfer
        )
    return parts.sent_bytes(processes) < added.sent_bytes(processes)


def solved(posed: Posed, local_decay: str) -> tuple[Tensors, States]:
    """Return the new tensors and states of a layer, of which each process computes some outputs.

    Args:
        posed: the problem with all outputs and the rows of this process.
        local_decay: how the learning rate decays over the local iterations.
    """
    facts = cast(SharedFacts, posed.layer.shared_facts)
    problem, solver, local_steps = posed.problem, posed.method.solver, posed.method.local_steps
    most = row_counts(len(problem.start["weight"]), facts.processes)[0]
    first = most * distributed.get_rank(facts.group)

    def own(tensors: Mapping[str, Tensor]) -> Tensors:
        return {name: tensor[first : first + most] for name, tensor in tensors.items()}

    whole = _with_all_rows(problem, facts, solver, local_steps)
    columns: dict[str, Any] = {
        name: rows[..., first : first + most] for name, rows in _row_gradients(whole).items()
    }
    states = {
        name: {**state, **own({k: e for k, e in state.items() if k in solver.row_state})}
        for name, state in posed.states.items()
    }
    start = own(problem.start)
    narrower = _narrower(problem.linear_map, len(start["weight"]))
    part = replace(
        whole,
        **columns,
        linear_map=problem.linear_map if narrower is None else narrower,
        start=start,
        fixed=own(problem.fixed),
        backprop=own(problem.backprop),
        base=own(problem.base),
        others=None,
        before=None,
        recorded=None,
    )
    new, states = dispatch.solve(solver, part, states, posed.numbers, local_steps, local_decay)
    return _of_all_outputs(new, states, solver.row_state, len(problem.start["weight"]), facts)


def _with_all_rows(
    problem: LocalProblem, facts: SharedFacts, solver: Solver, local_steps: int
) -> LocalProblem:
    """Return the problem with XᵀX of all processes if it is solved with XᵀX, else with all rows."""
    known: dict[str, Any] = {}
    exchange = cast(Exchange, problem.others)
    if isinstance(solver, Preconditioned):
        known["whole_square"] = solver.square(problem)  # the work for it stays divided by rows
    else:
        gram = problem.through_gram(local_steps)
        if gram is not None:
            # A number of the host, as the fused kernels take it.
            gram = replace(gram, rows=1.0 if exchange.mean else float(facts.rows))
            return replace(problem, x=gram, row_weight=1.0)
    weight = cast(float, problem.row_weight)
    for name, rows in _row_gradients(problem).items():
        known[name] = of_all([facts.group], rows).flatten(0, 1)
    known["x"] = _all_inputs(problem, facts)
    known["row_weight"] = weight / facts.divisor if exchange.mean else weight
    return replace(problem, **known)


def _all_inputs(problem: LocalProblem, facts: SharedFacts) -> Any:
    """Return the inputs of all processes, whose shapes are those of this process."""
    if not isinstance(problem.linear_map, ConvMap):
        return of_all([facts.group], problem.x).flatten(0, 1)
    sizes, numbers = problem.linear_map.packed(problem.x)
    of_each = of_all([facts.group], numbers).flatten()
    return problem.linear_map.unpacked(sizes * facts.processes, of_each)


def _row_gradients(problem: LocalProblem) -> Tensors:
    """Return ∂L/∂a and ∂L/∂y of each row, ``[rows, d]``, as far as the target needs them."""
    known = {"g": problem.g, "v": problem.v}
    return {key: rows for key, rows in known.items() if rows is not None}


def _of_all_outputs(
    new: Tensors, states: States, row_state: frozenset[str], d: int, facts: SharedFacts
) -> tuple[Tensors, States]:
    """Return tensors and states with the outputs of all processes, by one all-gather."""
    found, whole_states = dict(new), {name: dict(state) for name, state in states.items()}
    places = [(found, name) for name in new]
    places += [(s, key) for s in whole_states.values() for key in sorted(s) if key in row_state]
    parts = [_matrix(holder[key]) for holder, key in places]
    most = row_counts(d, facts.processes)[0]
    packed = gathered(padded_to(torch.cat(parts, dim=1), most), facts.group)[:d]
    columns = torch.split(packed, [part.shape[1] for part in parts], dim=1)
    for (holder, key), rows in zip(places, columns, strict=True):
        holder[key] = rows.reshape(d, *holder[key].shape[1:])
    return found, whole_states


def _matrix(entry: Tensor) -> Tensor:
    """Return a tensor ``[d, ...]``, possibly without rows, as ``[d, columns]``."""
    return entry.flatten(1) if entry.dim() > 1 else entry.unsqueeze(1)
