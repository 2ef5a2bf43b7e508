"""Random training programs as data: a small model, a loss, a loop and a method.

A program is a list of instructions on numbered values; value 0 is the input, and value i + 1 the result
of instruction i. :class:`Model` runs it, as users write models: with in-place operations, checkpoints,
layers that are called several times. With ``plain=True`` it runs the same program without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FALLBACK_LR = 0.05
TRANSFERS = ("tanh", "relu", "leaky_relu", "sigmoid", "softplus")
ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu": F.gelu,  # not monotone: no matching loss
}
IN_PLACE = {
    "tanh": torch.tanh_,
    "relu": torch.relu_,
    "leaky_relu": lambda a: F.leaky_relu(a, inplace=True),
    "sigmoid": torch.sigmoid_,
}


class Conv1D(nn.Module):
    """The layer of GPT-2 in Hugging Face's Transformers, which is known by its qualified name."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(0.3 * torch.randn(nx, nf))
        self.bias = nn.Parameter(0.1 * torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return out.view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"

# What autograd saves no output of, so that the next operation may overwrite it.
OVERWRITABLE = ("layer", "add", "scale", "cat")


@dataclass(frozen=True)
class Instruction:
    """One operation; ``what`` is the number of a layer or the name of an activation."""

    op: str  # layer, act, add, mul, cat, scale, gain, norm, flatten or detach
    inputs: tuple[int, ...]
    what: Any = None
    in_place: bool = False


@dataclass(frozen=True)
class Layer:
    """A layer: its class and the arguments of its constructor."""

    kind: str
    arguments: dict[str, Any]
    frozen: tuple[str, ...] = ()

    def make(self) -> nn.Module:
        if self.kind == "GPT2Conv1D":
            return Conv1D(**self.arguments)
        return getattr(nn, self.kind)(**self.arguments)


@dataclass(frozen=True)
class Head:
    """A value that the model returns, and its loss: mse, bce, ce or square."""

    value: int
    loss: str


@dataclass(frozen=True)
class Program:
    """A model, its data, the loop and the method that trains it."""

    seed: int
    shape: tuple[int, ...]  # of the input, with the batch
    layers: tuple[Layer, ...]
    instructions: tuple[Instruction, ...]
    heads: tuple[Head, ...]
    method: dict[str, Any]  # arguments of LocoProp
    steps: int = 2
    micro_batches: int = 1
    separate: bool = False  # a backward pass for each head
    checkpointed: tuple[int, int] | None = None  # instructions that are computed again
    penalty: float = 0.0  # times the sum of squares of all layers' weights
    clip: float | None = None  # largest norm of all gradients
    between: str = ""  # a pass before each step's own: "no_grad", "unused" or ""
    set_to_none: bool = True
    knows_output: bool = False  # output_transfer= is given
    names_heads: bool = False  # transfers= is given for heads

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, input {self.shape}"]
        lines += [f"layer {k}: {each}" for k, each in enumerate(self.layers)]
        for i, each in enumerate(self.instructions):
            lines.append(f"value {i + 1} = {each}")
        lines += [f"{each}" for each in self.heads]
        lines.append(f"method {self.method}")
        usual = {f.name: f.default for f in self.__dataclass_fields__.values()}
        others = ("steps", "micro_batches", "separate", "checkpointed", "penalty", "clip")
        others = (*others, "between", "set_to_none", "knows_output", "names_heads")
        told = {name: getattr(self, name) for name in others}
        lines.append(str({k: v for k, v in told.items() if v != usual[k]}))
        return "\n".join(lines)

    def users(self, value: int) -> list[int]:
        """Return the instructions that use a value."""
        return [i for i, each in enumerate(self.instructions) if value in each.inputs]

    def without_dead_parts(self) -> Program:
        """Return the program without instructions and layers that no head needs."""
        needed = {head.value for head in self.heads}
        for i in reversed(range(len(self.instructions))):
            if i + 1 in needed:
                needed |= set(self.instructions[i].inputs)
        kept = [i for i in range(len(self.instructions)) if i + 1 in needed]
        number = {0: 0} | {i + 1: n + 1 for n, i in enumerate(kept)}
        used = sorted({e.what for i in kept if (e := self.instructions[i]).op == "layer"})
        instructions = []
        for i in kept:
            each = self.instructions[i]
            what = used.index(each.what) if each.op == "layer" else each.what
            inputs = tuple(number[v] for v in each.inputs)
            instructions.append(replace(each, inputs=inputs, what=what))
        return replace(
            self,
            layers=tuple(self.layers[k] for k in used),
            instructions=tuple(instructions),
            heads=tuple(replace(head, value=number[head.value]) for head in self.heads),
        )

    def targets(self, outputs: list[Tensor], part: int, step: int) -> list[Tensor]:
        """Return the target of each head, the same for equal arguments."""
        found = []
        for n, (head, out) in enumerate(zip(self.heads, outputs, strict=True)):
            draw = torch.Generator().manual_seed(self.seed + 1000 * step + 100 * part + n)
            if head.loss == "ce":
                found.append(torch.randint(out.shape[-1], out.shape[:-1], generator=draw))
            else:
                found.append(torch.rand(out.shape, generator=draw, dtype=torch.float64))
        return found

    def batch(self, part: int, step: int) -> Tensor:
        """Return one input."""
        draw = torch.Generator().manual_seed(self.seed + 1000 * step + 100 * part + 50)
        return torch.randn(self.shape, generator=draw, dtype=torch.float64)

    def losses(self, outputs: list[Tensor], part: int, step: int) -> list[Tensor]:
        """Return the loss of each head."""
        pairs = zip(self.heads, outputs, self.targets(outputs, part, step), strict=True)
        return [_loss(head.loss, out, target) for head, out, target in pairs]


def _loss(name: str, out: Tensor, target: Tensor) -> Tensor:
    if name == "ce":
        return F.cross_entropy(out.flatten(0, -2), target.flatten())
    if name == "square":
        return 0.5 * (out - target).square().sum() / len(out)
    return {"mse": F.mse_loss, "bce": F.binary_cross_entropy_with_logits}[name](out, target)


@dataclass(eq=False)
class Seen:
    """What a plain run has computed: the inputs and the result of each instruction."""

    index: int
    inputs: list[Tensor] = field(repr=False)
    value: Tensor = field(repr=False)

    @property
    def gradient(self) -> Tensor:
        """The gradient of the loss with respect to the result."""
        return torch.zeros_like(self.value) if self.value.grad is None else self.value.grad


class Model(nn.Module):
    """Runs a program."""

    def __init__(self, program: Program, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program, self.plain = program, plain
        self.layers = nn.ModuleList(layer.make() for layer in program.layers)
        gains = sum(each.op == "gain" for each in program.instructions)
        self.gains = nn.ParameterList(nn.Parameter(torch.tensor(1.2)) for _ in range(gains))
        self.double()
        for module, layer in zip(self.layers, program.layers, strict=True):
            for name in layer.frozen:
                getattr(module, name).requires_grad_(False)
        self.seen: list[Seen] = []

    def forward(self, x: Tensor) -> tuple[Tensor, ...] | Tensor:
        values = {0: x}
        first, last = (0, 0) if self.plain else self.program.checkpointed or (0, 0)
        for i in range(len(self.program.instructions)):
            if i == first < last:
                values |= self._again(values, first, last)
            elif not first <= i < last:
                values[i + 1] = self._run(i, values)
        outputs = tuple(values[head.value] for head in self.program.heads)
        return outputs if len(outputs) > 1 else outputs[0]

    def _again(self, values: dict[int, Tensor], first: int, last: int) -> dict[int, Tensor]:
        """Run some instructions under a checkpoint and return their values."""
        used = {v for each in self.program.instructions[first:last] for v in each.inputs}
        before = [v for v in values if v in used]

        def segment(*given: Tensor) -> tuple[Tensor, ...]:
            own = dict(zip(before, given, strict=True))
            for i in range(first, last):
                own[i + 1] = self._run(i, own)
            return tuple(own[i + 1] for i in range(first, last))

        given = [values[v] for v in before]
        found = checkpoint(segment, *given, use_reentrant=False)
        return {first + 1 + n: value for n, value in enumerate(found)}

    def _run(self, i: int, values: dict[int, Tensor]) -> Tensor:
        each = self.program.instructions[i]
        inputs = [values[n] for n in each.inputs]
        result = self._result(i, each, inputs)
        if self.plain:
            if result.requires_grad and not result.is_leaf:
                result.retain_grad()
            self.seen.append(Seen(i, [t.detach() for t in inputs], result))
        return result

    def _result(self, i: int, each: Instruction, inputs: list[Tensor]) -> Tensor:
        x, in_place = inputs[0], each.in_place and not self.plain
        match each.op:
            case "layer":
                return self.layers[each.what](*inputs)
            case "act":
                return IN_PLACE[each.what](x) if in_place else ACTIVATIONS[each.what](x)
            case "add":
                return x.add_(inputs[1]) if in_place else x + inputs[1]
            case "mul":
                return x * inputs[1]
            case "cat":
                return torch.cat(inputs, -1)
            case "scale":
                return x.mul_(0.7) if in_place else 0.7 * x
            case "gain":
                earlier = self.program.instructions[:i]
                return x * self.gains[sum(e.op == "gain" for e in earlier)]
            case "norm":
                return F.layer_norm(x, x.shape[-1:])
            case "flatten":
                return x.flatten(1)
            case "detach":
                return x.detach()
        raise ValueError(f"Unknown operation {each.op!r}.")
