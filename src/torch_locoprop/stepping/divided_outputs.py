"""Local iterations of layers under DDP, with the outputs divided among the processes.

Each process solves the problems of some outputs for the rows of all processes: with XᵀX, which is added
up once, or with all rows, which are gathered once. One all-gather then brings all new rows of the
layer's tensors, and of the solver's state, to all processes. Without this division, every process
solves all outputs with its own rows, and the processes add up a gradient in each iteration.
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
from torch_locoprop.paper.gram import Gram, saves_work
from torch_locoprop.paper.linear_map import Dense
from torch_locoprop.paper.local_problem import LocalProblem
from torch_locoprop.paper.tensors import Tensors
from torch_locoprop.solvers import FirstOrder
from torch_locoprop.solvers.base import States
from torch_locoprop.stepping.build_problem import Posed
from torch_locoprop.stepping.layer_part import couples_outputs

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
    iterates = isinstance(method.solver, FirstOrder) and method.local_steps > 1
    whole_rows = facts.all_have_rows and facts.active == facts.processes
    weight = problem.start.get("weight")
    if not (iterates and whole_rows) or weight is None or weight.dim() > 2:
        return False
    of_rows = problem.target.needs | problem.regularizer.needs
    if not of_rows <= {"g", "v"} or couples_outputs(posed.layer, method):
        return False
    d, n = weight.shape
    if d < facts.processes:
        return False
    if not of_rows and _goes_through_gram(problem, facts, method.local_steps):
        return n >= PAYS_FROM
    dense = type(problem.linear_map) is Dense
    gathers = dense and facts.equal_rows and not facts.some_have_gram
    return gathers and _gathers_less(posed, facts, d, n)


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
    size, bias = posed.layer.like.element_size(), "bias" in posed.problem.start
    processes, solver = facts.processes, posed.method.solver
    rows = communication.rows_in_ddp(facts.rows // processes, n, processes, size)
    for _ in _row_gradients(posed.problem):
        rows = rows.plus(communication.rows_in_ddp(facts.rows // processes, d, processes, size))
    entries = len(solver.row_state)
    found = communication.outputs_in_ddp(d, n + bias, entries, processes, size)
    added = communication.by_iterations_in_ddp(d, n, bias, posed.method.local_steps, size)
    return rows.plus(found).sent_bytes(processes) < added.sent_bytes(processes)


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

    whole = _with_all_rows(problem, facts, local_steps)
    columns: dict[str, Any] = {
        name: rows[..., first : first + most] for name, rows in _row_gradients(whole).items()
    }
    states = {
        name: {**state, **own({k: e for k, e in state.items() if k in solver.row_state})}
        for name, state in posed.states.items()
    }
    part = replace(
        whole,
        **columns,
        start=own(problem.start),
        fixed=own(problem.fixed),
        backprop=own(problem.backprop),
        base=own(problem.base),
        others=None,
        before=None,
        recorded=None,
    )
    new, states = dispatch.solve(solver, part, states, posed.numbers, local_steps, local_decay)
    return _of_all_outputs(new, states, solver.row_state, len(problem.start["weight"]), facts)


def _with_all_rows(problem: LocalProblem, facts: SharedFacts, local_steps: int) -> LocalProblem:
    """Return the problem with XᵀX of all processes if it is solved with XᵀX, else with all rows."""
    gram = problem.through_gram(local_steps)
    if gram is not None:
        return replace(problem, x=gram, row_weight=1.0)
    exchange = cast(Exchange, problem.others)
    weight = cast(float, problem.row_weight)
    own = {"x": problem.x, **_row_gradients(problem)}
    rows: dict[str, Any] = {
        name: of_all([facts.group], tensor).flatten(0, 1) for name, tensor in own.items()
    }
    rows["row_weight"] = weight / facts.divisor if exchange.mean else weight
    return replace(problem, **rows)


def _row_gradients(problem: LocalProblem) -> Tensors:
    """Return ∂L/∂a and ∂L/∂y of each row, ``[rows, d]``, as far as the target needs them."""
    known = {"g": problem.g, "v": problem.v}
    needs = problem.target.needs
    return {key: rows for key, rows in known.items() if rows is not None and key in needs}


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
