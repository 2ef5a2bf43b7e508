"""Which transfer is behind each layer of a program, by the rules of the documentation."""

from __future__ import annotations

from typing import Any

from fuzz.programs import TRANSFERS, Instruction, Program

MATCHING = {"mse": "linear", "bce": "sigmoid", "ce": "softmax", "square": "linear"}


class Roles:
    """Which transfer is behind each call of a layer, read from the program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        count = len(program.instructions)
        self._heads = {head.value for head in program.heads}
        # Instructions from which a layer or a head can be reached by differentiation.
        self._goes_on = [False] * count
        for i in reversed(range(count)):
            follows = any(
                each.op != "detach" and (each.op == "layer" or self._goes_on[j])
                for j in program.users(i + 1)
                for each in [program.instructions[j]]
            )
            self._goes_on[i] = i + 1 in self._heads or follows

    def settings(self) -> dict[str, Any]:
        """Return what the optimizer is told of the output: ``output_transfer`` or ``transfers``."""
        program = self._program
        heads = {head.value: MATCHING[head.loss] for head in program.heads}
        if not program.names_heads:
            return {"output_transfer": self._common(heads)} if program.knows_output else {}
        calls = [each.what for each in program.instructions if each.op == "layer"]
        named = {}
        for i, each in enumerate(program.instructions):
            if each.op == "layer" and calls.count(each.what) == 1 and i + 1 in heads:
                named[f"layers.{each.what}"] = self._allowed(heads[i + 1], each)
        return {"transfers": named}

    def transfer(self, number: int, calls: list[int]) -> tuple[str | None, dict[int, int]]:
        """Return the transfer of a layer, and the instruction that computes it behind each call.

        Args:
            number: which layer.
            calls: the calls that a backward pass has reached.
        """
        named = self.settings().get("transfers", {}).get(f"layers.{number}")
        found = [self._behind(call + 1) for call in calls]
        places = {call: place for call, (_, place) in zip(calls, found, strict=True)}
        if named is not None:
            return named, places
        names = {name for name, _ in found}
        if len(names) != 1:
            return None, places
        name = names.pop()
        if name == "output":
            name = self.settings().get("output_transfer")
            if name == "softmax" and self._width(number) == 1:
                name = None
        return name, places

    def _behind(self, value: int) -> tuple[str | None, int]:
        """Return the transfer behind a value ("output": it is in the loss), and its instruction."""
        users = self._users(value)
        if not users:
            return "output", -1
        if len(users) > 1:
            return None, -1
        each = self._program.instructions[users[0]]
        if each.op == "layer":
            return "linear", -1
        if each.op == "act" and each.what in TRANSFERS:
            return each.what, users[0]
        return None, -1

    def _users(self, value: int) -> list[int]:
        """Return what uses a value: operations, behind changes of its shape."""
        found = []
        for i in self._program.users(value):
            each = self._program.instructions[i]
            if each.op == "flatten":
                found += self._users(i + 1)
            elif each.op == "layer" or (each.op != "detach" and self._goes_on[i]):
                found.append(i)
        return found

    def _common(self, heads: dict[int, str]) -> str:
        """Return the transfer of the first head; one that no image has if there are images."""
        first = next(iter(heads.values()))
        images = any(
            "Conv" in layer.kind and "GPT" not in layer.kind for layer in self._program.layers
        )
        return "sigmoid" if first == "softmax" and images else first

    def _allowed(self, name: str, each: Instruction) -> str:
        return "linear" if name == "softmax" and self._width(each.what) == 1 else name

    def _width(self, number: int) -> int:
        own = self._program.layers[number].arguments
        return own.get("out_features") or own.get("nf") or own["out_channels"]
