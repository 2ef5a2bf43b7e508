"""Runs a program with the library and with the oracle, and reduces a program that tells them apart."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from fuzz import oracle
from fuzz.generate import is_valid
from fuzz.programs import FALLBACK_LR, Model, Program
from torch import Tensor

from torch_locoprop import LocoProp

TOLERANCE = 1e-10
LARGEST = 1e3  # weights beyond it come from a run that diverges, in which rounding errors grow
# Warnings that say nothing about what was computed.
ADVICE = (".*has no effect with solver", "In the first step", "The first step changes")


def train(program: Program) -> list[Tensor]:
    """Return the parameters after all steps with the library."""
    model = Model(program)
    opt = LocoProp(
        model,
        fallback=lambda params: torch.optim.SGD(params, lr=FALLBACK_LR),
        **oracle.Roles(program).settings(),
        **program.method,
    )
    for step in range(program.steps):
        if program.between == "unused":
            model(program.batch(7, step))
        elif program.between == "no_grad":
            with torch.no_grad():
                model(program.batch(7, step))
        for part in range(program.micro_batches):
            outputs = model(program.batch(part, step))
            outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
            _backward(program, model, program.losses(outputs, part, step))
        if program.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), program.clip)
        opt.step()
        opt.zero_grad(program.set_to_none)
    return [p.detach() for p in model.parameters()]


def _backward(program: Program, model: Model, losses: list[Tensor]) -> None:
    losses = [loss for loss in losses if loss.requires_grad]
    if program.penalty:
        squares = [m.weight.square().sum() for m in model.layers if m.weight.requires_grad]
        if squares:
            losses.append(program.penalty * sum(squares))
    if not program.separate:
        sum(losses).backward()
        return
    for n, loss in enumerate(losses):
        loss.backward(retain_graph=n + 1 < len(losses))


def difference(program: Program) -> str | None:
    """Return what differs between the library and the oracle; None if nothing does."""
    with np.errstate(all="ignore"):
        expected = oracle.train(program)
    if not all(bool((p.abs() <= LARGEST).all()) for p in expected):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message in ADVICE:
                warnings.filterwarnings("ignore", message=message)
            found = train(program)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for (name, _), one, other in zip(
        Model(program).named_parameters(), found, expected, strict=True
    ):
        scale = max(1.0, float(other.abs().max()))
        far = float((one - other).abs().max())
        if not far <= TOLERANCE * scale:
            return f"{name} differs by {far:.2g}"
    return None


def reduced(program: Program) -> Program:
    """Return the smallest program found that still differs."""
    before = _kind(difference(program))
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if _is_program(candidate) and _kind(difference(candidate)) == before:
                program, smaller = candidate, True
                break
    return program


def _kind(told: str | None) -> str | None:
    """Return ``differs``, or the name of an error."""
    if told is None:
        return None
    return "differs" if " differs by " in told else told.partition(":")[0]


def _is_program(candidate: Program) -> bool:
    """Return True if shapes fit and a layer is trained."""
    try:
        return is_valid(candidate)
    except (RuntimeError, IndexError):
        return False


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs that lack one part of this one."""
    usual = {"steps": 1, "micro_batches": 1, "separate": False, "checkpointed": None}
    usual |= {"penalty": 0.0, "clip": None, "between": "", "set_to_none": True}
    usual |= {"knows_output": False, "names_heads": False}
    for name, value in usual.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})
    if program.checkpointed is None:
        for i in range(len(program.instructions)):
            for value in program.instructions[i].inputs:
                yield _without(program, i, value)
        for head in program.heads:
            if len(program.heads) > 1:
                others = tuple(each for each in program.heads if each != head)
                yield replace(program, heads=others).without_dead_parts()
    for i, each in enumerate(program.instructions):
        if each.in_place:
            kept = list(program.instructions)
            kept[i] = replace(each, in_place=False)
            yield replace(program, instructions=tuple(kept))
    for k, layer in enumerate(program.layers):
        if layer.frozen:
            others = list(program.layers)
            others[k] = replace(layer, frozen=())
            yield replace(program, layers=tuple(others))
    for name, value in (("weight_decay", 0.0), ("regularizer", None), ("local_steps", 2)):
        if program.method.get(name, value) != value:
            yield replace(program, method={**program.method, name: value})


def _without(program: Program, index: int, value: int) -> Program:
    """Return the program in which a value takes the place of an instruction's result."""
    instructions = tuple(
        replace(each, inputs=tuple(value if n == index + 1 else n for n in each.inputs))
        for each in program.instructions
    )
    heads = tuple(
        replace(head, value=value if head.value == index + 1 else head.value)
        for head in program.heads
    )
    return replace(program, instructions=instructions, heads=heads).without_dead_parts()
