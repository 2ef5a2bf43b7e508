"""Random programs agree with an oracle that knows only autograd and the paper's formulas.

``make fuzz`` runs further programs until it is interrupted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from fuzz import compare, oracle
from fuzz.generate import VARIANTS, program
from fuzz.programs import Head, Instruction, Layer, Program

SEEDS, PARTS = 300, 10


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        told = compare.difference(program(seed))
        assert told is None, f"seed {seed}: {told}\n{program(seed)}"


@pytest.mark.parametrize("seed", [2119018147, 2119020830])
def test_programs_in_which_a_layer_loses_its_gradient(seed: int) -> None:
    """All outputs of a ReLU are zero in the last step; before it the layer has moved."""
    assert compare.difference(program(seed)) is None


def test_the_programs_have_everything_in_them() -> None:
    """Every kind of layer, operation and method is in many programs."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        each = program(seed)
        calls = Counter(one.what for one in each.instructions if one.op == "layer")
        seen.update({layer.kind for layer in each.layers})
        seen.update({one.op for one in each.instructions})
        seen[str(each.method.get("variant", "spectral"))] += 1
        seen[each.method.get("solver", "")] += 1
        seen["frozen"] += any(layer.frozen for layer in each.layers)
        seen["shared"] += max(calls.values()) > 1
        seen["in place"] += any(one.in_place for one in each.instructions)
        seen["several losses"] += len(each.heads) > 1
        seen["checkpointed"] += each.checkpointed is not None
        seen["accumulated"] += each.micro_batches > 1
    kinds = ["Linear", "Bilinear", "GPT2Conv1D"]
    kinds += [f"Conv{way}{n}d" for way in ("", "Transpose") for n in (1, 2, 3)]
    operations = ["act", "add", "mul", "cat", "scale", "gain", "norm", "flatten", "detach"]
    loops = ["frozen", "shared", "in place", "several losses", "checkpointed", "accumulated"]
    methods = [*VARIANTS, "exact", "spectral", "sgd", "momentum", "nesterov", "adagrad"]
    rare = {name: seen[name] for name in (*kinds, *operations, *loops, *methods) if seen[name] < 5}
    assert not rare


SMALL = Program(
    seed=0,
    shape=(4, 3),
    layers=(
        Layer("Linear", {"in_features": 3, "out_features": 5, "bias": True}),
        Layer("Linear", {"in_features": 5, "out_features": 2, "bias": True}),
    ),
    instructions=(
        Instruction("layer", (0,), 0),
        Instruction("scale", (1,)),
        Instruction("act", (2,), "tanh"),
        Instruction("layer", (3,), 1),
    ),
    heads=(Head(4, "mse"),),
    method={
        **{"variant": "locoprop-s", "solver": "sgd", "lr": 0.02, "gamma": 3.0, "local_steps": 3},
        **{"weight_decay": 0.5, "local_reduction": "sum", "local_decay": "linear"},
        **{"momentum": 0.0, "decay": 0.0, "eps": 1e-5, "regularizer": None},
    },
    micro_batches=2,
    clip=0.05,
)


def test_an_error_is_found_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an oracle whose weight decay is wrong, one layer and the weight decay are left."""
    assert compare.difference(SMALL) is None
    honest = oracle.train

    def wrong(given: Program) -> list:  # type: ignore[type-arg]
        decay = given.method["weight_decay"]
        return honest(replace(given, method={**given.method, "weight_decay": 2 * decay}))

    monkeypatch.setattr(oracle, "train", wrong)
    assert "differs by" in str(compare.difference(SMALL))
    found = compare.reduced(SMALL)
    assert len(found.layers) == 1
    assert [each.op for each in found.instructions] == ["layer"]
    assert found.method["weight_decay"] == 0.5
    assert (found.micro_batches, found.clip, found.steps) == (1, None, 1)
