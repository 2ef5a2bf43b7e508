"""Draws random programs; equal seeds give equal programs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from fuzz.programs import (
    ACTIVATIONS,
    IN_PLACE,
    OVERWRITABLE,
    Head,
    Instruction,
    Layer,
    Model,
    Program,
)
from torch import Tensor

SOLVERS = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam")
VARIANTS = ("locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m")


def program(seed: int) -> Program:
    """Return the program of a seed."""
    draw = random.Random(seed)
    while True:
        found = _Draw(draw, seed).program()
        if found is not None:
            return found


class _Draw:
    """Draws one program, with the shapes of its values."""

    def __init__(self, draw: random.Random, seed: int) -> None:
        self.draw, self.seed = draw, seed
        domain = draw.choice(("vector", "vector", "sequence", "image1", "image2", "image3"))
        rows, n = draw.randint(2, 5), draw.randint(2, 5)
        sizes = {
            "vector": (),
            "sequence": (2,),
            "image1": (5,),
            "image2": (4, 3),
            "image3": (2, 3, 2),
        }
        positions = sizes[domain]
        self.is_image = domain.startswith("image")
        self.shape = (rows, n, *positions) if self.is_image else (rows, *positions, n)
        self.shapes = [self.shape]
        self.layers: list[Layer] = []
        self.instructions: list[Instruction] = []

    def program(self) -> Program | None:
        for _ in range(self.draw.randint(2, 9)):
            self._instruction()
        unused = [v for v in range(1, len(self.shapes)) if not self._uses(v)]
        if not unused:
            return None
        count = min(len(unused), self.draw.choice((1, 1, 1, 2, 3)))
        heads = [self._head(value) for value in self.draw.sample(unused, count)]
        found = Program(
            seed=self.seed,
            shape=self.shape,
            layers=tuple(self.layers),
            instructions=tuple(self.instructions),
            heads=tuple(heads),
            method=self._method(),
        ).without_dead_parts()
        if not is_valid(found):
            return None
        return _with_overwrites(self.draw, self._with_loop(found))

    # ---- instructions ----------------------------------------------------------------------------

    def _uses(self, value: int) -> bool:
        return any(value in each.inputs for each in self.instructions)

    def _instruction(self) -> None:
        draw = self.draw
        recent = len(self.shapes) - 1
        value = recent if draw.random() < 0.7 else draw.randint(0, recent)
        op = draw.choices(
            ("layer", "act", "add", "mul", "cat", "scale", "gain", "norm", "flatten", "detach"),
            (10, 8, 3, 1, 1, 1, 1, 1, 1, 0.3),
        )[0]
        shape = self.shapes[value]
        alike = [v for v, other in enumerate(self.shapes) if other == shape and v != value]
        match op:
            case "layer":
                self._layer(value)
            case "act":
                self._add(op, (value,), shape, draw.choice(list(ACTIVATIONS)))
            case "add" | "mul" if alike:
                self._add(op, (value, draw.choice(alike)), shape)
            case "cat" if alike and len(shape) == 2:
                self._add(op, (value, draw.choice(alike)), (shape[0], 2 * shape[1]))
            case "norm" if len(shape) == 2 and shape[-1] > 2:
                self._add(op, (value,), shape)
            case "flatten" if self.is_image and len(shape) > 2:
                self._add(op, (value,), (shape[0], torch.Size(shape[1:]).numel()))
            case "scale" | "gain" | "detach" if value > 0:
                self._add(op, (value,), shape)

    def _add(
        self, op: str, inputs: tuple[int, ...], shape: tuple[int, ...], what: Any = None
    ) -> None:
        self.instructions.append(Instruction(op, inputs, what))
        self.shapes.append(tuple(shape))

    def _layer(self, value: int) -> None:
        """Add a call of a layer, of one that there is if that fits."""
        draw, shape = self.draw, self.shapes[value]
        again = [
            k for k, layer in enumerate(self.layers) if self._result(layer, [shape]) is not None
        ]
        if again and draw.random() < 0.3:
            number = draw.choice(again)
            self._add("layer", (value,), self._result(self.layers[number], [shape]), number)
            return
        d, bias = draw.randint(1, 5), draw.random() < 0.8
        dimensions = len(shape) - 2 if self.is_image and len(shape) > 2 else 0
        inputs = (value,)
        if dimensions:
            layer = self._convolution(dimensions, shape[1], bias)
        elif draw.random() < 0.15:
            layer = Layer("GPT2Conv1D", {"nf": d, "nx": shape[-1]})
        elif draw.random() < 0.15:
            others = [v for v, other in enumerate(self.shapes) if other[:-1] == shape[:-1]]
            inputs = (value, draw.choice(others))
            n1, n2 = (self.shapes[v][-1] for v in inputs)
            own = {"in1_features": n1, "in2_features": n2, "out_features": d, "bias": bias}
            layer = Layer("Bilinear", own)
        else:
            layer = Layer("Linear", {"in_features": shape[-1], "out_features": d, "bias": bias})
        result = self._result(layer, [self.shapes[v] for v in inputs])
        if result is None:
            return
        if draw.random() < 0.2:
            names = ["weight", "bias"] if "bias" not in layer.arguments or bias else ["weight"]
            frozen = draw.choice((("weight",), ("bias",), ("weight", "bias")))
            layer = replace(layer, frozen=tuple(n for n in frozen if n in names))
        self.layers.append(layer)
        self._add("layer", inputs, result, len(self.layers) - 1)

    def _convolution(self, dimensions: int, channels: int, bias: bool) -> Layer:
        draw = self.draw
        groups = 2 if channels % 2 == 0 and draw.random() < 0.4 else 1
        transposed = draw.random() < 0.3
        arguments = {
            "in_channels": channels,
            "out_channels": groups * draw.randint(1, 3),
            "kernel_size": draw.randint(1, 3 if dimensions < 3 else 2),
            "stride": draw.choice((1, 1, 2)),
            "padding": draw.choice((0, 1)),
            "dilation": draw.choice((1, 1, 2)),
            "groups": groups,
            "bias": bias,
        }
        return Layer(f"Conv{'Transpose' if transposed else ''}{dimensions}d", arguments)

    def _result(self, layer: Layer, shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Return the shape of a layer's output; None if the layer cannot take these inputs."""
        if layer.kind == "Bilinear" and len(shapes) == 1:
            return None
        is_convolution = layer.kind.startswith("Conv")
        if is_convolution is not (self.is_image and len(shapes[0]) > 2):
            return None
        if is_convolution and layer.arguments["in_channels"] != shapes[0][1]:
            return None
        own = layer.arguments.get("in_features", layer.arguments.get("nx", shapes[0][-1]))
        if not is_convolution and own != shapes[0][-1]:
            return None
        try:
            with torch.no_grad():
                out: Tensor = layer.make()(*map(torch.zeros, shapes))
        except RuntimeError:  # a kernel larger than the image
            return None
        return tuple(out.shape) if 0 < out.numel() < 400 else None

    # ---- losses, methods, loops ------------------------------------------------------------------

    def _head(self, value: int) -> Head:
        shape = self.shapes[value]
        vectors = not self.is_image or len(shape) == 2
        losses = ["mse", "bce", "square"]
        if vectors and shape[-1] > 1:
            losses.append("ce")
        return Head(value, self.draw.choice(losses))

    def _method(self) -> dict[str, Any]:
        draw = self.draw
        kind = draw.choice((*VARIANTS, "locoprop-m", "exact", "exact", "spectral"))
        if kind == "spectral":
            return {"preset": draw.choice(("general", "spectral")), "momentum": 0.7, "decay": 0.6}
        own: dict[str, Any] = {
            "lr": draw.choice((0.003, 0.02)),
            "gamma": draw.choice((0.5, 3.0)),
            "weight_decay": draw.choice((0.0, 0.0, 0.5)),
            "local_reduction": draw.choice(("sum", "sum", "mean")),
        }
        if kind == "exact":
            return {"variant": draw.choice(VARIANTS[:2]), "solver": "exact", **own}
        return {
            "variant": kind,
            "solver": draw.choice(SOLVERS),
            "local_steps": draw.randint(1, 4),
            "momentum": 0.5,
            "decay": 0.8,
            "eps": 1e-2,
            "local_decay": draw.choice(("linear", "constant")),
            "regularizer": draw.choice((None, None, "l2")),
            **own,
        }

    def _with_loop(self, found: Program) -> Program:
        draw = self.draw
        is_pocoprop = str(found.method.get("variant")).startswith("pocoprop")
        cut = any(each.op == "detach" for each in found.instructions)
        count = len(found.instructions)
        first = draw.randrange(count)
        checkpointed = (first, draw.randint(first + 1, count)) if draw.random() < 0.25 else None
        return replace(
            found,
            steps=draw.choice((1, 2, 3)),
            micro_batches=draw.choice((1, 1, 2)),
            separate=draw.random() < 0.3,
            checkpointed=checkpointed,
            penalty=0.02 if not (is_pocoprop or cut) and draw.random() < 0.1 else 0.0,
            clip=0.05 if draw.random() < 0.15 else None,
            between=draw.choice(("", "", "no_grad", "unused")),
            set_to_none=draw.random() < 0.7,
            knows_output=draw.random() < 0.5,
            names_heads=draw.random() < 0.3,
        )


def is_valid(found: Program) -> bool:
    """Return True if a layer is trained, and no value is both returned and used.

    The transfer of a layer whose output the model returns and uses depends on what the loss does.
    """
    returned = {head.value for head in found.heads}
    for i in reversed(range(len(found.instructions))):
        if i + 1 in returned and found.instructions[i].op == "flatten":
            returned |= set(found.instructions[i].inputs)
    users = [i for value in returned for i in found.users(value)]
    flat = [i for i in users if i + 1 in returned and found.instructions[i].op == "flatten"]
    if 0 in returned or len(flat) < len(users):
        return False
    return bool(found.layers) and _trains_a_layer(found)


def _trains_a_layer(found: Program) -> bool:
    """Return True if the loss has a gradient for at least one layer."""
    model = Model(found, plain=True)
    outputs = model(found.batch(0, 0))
    losses = found.losses(list(outputs) if isinstance(outputs, tuple) else [outputs], 0, 0)
    if not any(loss.requires_grad for loss in losses):
        return False
    sum(losses).backward()
    return any(p.grad is not None for p in model.layers.parameters())


def _with_overwrites(draw: random.Random, found: Program) -> Program:
    """Return the program with some operations in place, where autograd allows that."""
    instructions = list(found.instructions)
    heads = {head.value for head in found.heads}
    for i, each in enumerate(instructions):
        value = each.inputs[0]
        possible = each.op in ("add", "scale") or (each.op == "act" and each.what in IN_PLACE)
        if not possible or value == 0 or value in heads or len(found.users(value)) > 1:
            continue
        producer = instructions[value - 1]
        first, last = found.checkpointed or (0, 0)
        if first <= i < last and value <= first:  # what enters a checkpoint is needed again
            continue
        alone = producer.op in OVERWRITABLE and len(set(each.inputs)) == len(each.inputs)
        if alone and draw.random() < 0.5:
            instructions[i] = replace(each, in_place=True)
    return replace(found, instructions=tuple(instructions))
