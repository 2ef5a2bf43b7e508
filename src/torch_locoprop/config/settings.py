"""The settings of the optimizer, declared once: name, type, default, range, meaning.

:class:`Settings` is the only place where a setting is written down. The constructor's signature and
documentation, the checks, what a parameter group may hold, what a plan depends on and the key of a
CUDA graph are derived from it. By default a setting is part of the plan and of the graph key, so a
new one cannot be forgotten there.

The kinds of settings are in ``setting_kinds.py``, what a name such as ``"rmsprop"`` stands for is in
``components.py``, and parameter groups are in ``groups.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from torch_locoprop.config.setting_kinds import (
    Choice,
    Component,
    Count,
    Number,
    Setting,
    Switch,
)
from torch_locoprop.paper.names import unknown
from torch_locoprop.paper.regularizers import Regularizer
from torch_locoprop.paper.variants import Variant
from torch_locoprop.solvers import LOCAL_DECAYS, Solver

# The names that a type checker allows; tests compare them with the components of these names.
VariantName = Literal[
    "locoprop-s", "locoprop-m", "pocoprop-s", "pocoprop-m", "natural-s", "proxprop"
]
SolverName = Literal[
    "sgd",
    "momentum",
    "nesterov",
    "adagrad",
    "rmsprop",
    "adam",
    "exact",
    "preconditioned",
    "preconditioned-averaged",
    "spectral",
    "general",
]
RegularizerName = Literal["none", "l2", "l1", "fisher"]
LocalDecay = Literal["linear", "constant"]
LocalReduction = Literal["sum", "mean"]
LocalProducts = Literal["full", "bf16"]
GramStructure = Literal["full", "block", "diagonal"]
CapBy = Literal["weight", "backprop"]


Rate = Annotated[
    float,
    Number(
        default=1e-5,  # η
        per_tensor=True,
        in_graph_key=False,  # a CUDA graph reads it from the device
        meaning="the learning rate: in the spectral step entries of a weight move by about 0.2 lr; in "
        "local iterations it is the step η, and BackProp's learning rate corresponds to lr · gamma; "
        "with ``preconditioned`` it is the part of the way to the local solution, at most 1; with "
        "``preconditioned-averaged`` it is as in the spectral step. None takes the value of the preset "
        "or the solver.",
    ),
]


class Settings(TypedDict, total=False):
    """Every setting of :class:`torch_locoprop.LocoProp` that a parameter group may override."""

    variant: Annotated[
        VariantName | Variant,
        Component(
            default="locoprop-m",
            names_method=True,
            meaning="which local problem a layer solves: ``locoprop-s``, ``locoprop-m``, "
            "``pocoprop-s``, ``pocoprop-m``, ``natural-s``, ``proxprop``, or a "
            ":class:`~torch_locoprop.variants.Variant` of your own.",
        ),
    ]
    gamma: Annotated[
        float,
        Number(
            default=10.0,
            names_method=True,
            may_equal=False,
            meaning="distance γ of the target from the present activation.",
        ),
    ]
    local_steps: Annotated[
        int,
        Count(default=10, names_method=True, meaning="number T of local iterations in each step."),
    ]
    solver: Annotated[
        SolverName | Solver,
        Component(
            default="rmsprop",
            names_method=True,
            meaning="``sgd``, ``momentum``, ``nesterov``, ``adagrad``, ``rmsprop``, ``adam`` (with "
            "TensorFlow's semantics), ``exact``, ``spectral``, ``preconditioned`` (with defaults of "
            'its own: lr 1, gamma 0.05, three local steps, ``local_reduction="mean"``), '
            "``preconditioned-averaged`` (lr 0.03, momentum 0.9, decay 0.95, one local step), or a "
            ":class:`~torch_locoprop.solvers.Solver` of your own.",
        ),
    ]
    momentum: Annotated[
        float,
        Number(
            default=0.999,
            below=1.0,
            per_tensor=True,
            meaning="the solver's momentum μ, or β₁ of adam, or the weight of the past in the average "
            "gradient of the spectral step or the average displacement of ``preconditioned-averaged``.",
        ),
    ]
    decay: Annotated[
        float,
        Number(
            default=0.9,
            below=1.0,
            per_tensor=True,
            meaning="the solver's decay ρ of squared gradients, or β₂ of adam.",
        ),
    ]
    eps: Annotated[
        float,
        Number(
            default=1e-5,
            names_method=True,
            per_tensor=True,
            meaning="the solver's ε; with adagrad the start of its accumulator.",
        ),
    ]
    weight_decay: Annotated[
        float,
        Number(
            default=0.0,
            per_tensor=True,
            meaning="weights, not biases, shrink by ``1 − lr · weight_decay`` once a step, before "
            "the local iterations.",
        ),
    ]
    regularizer: Annotated[
        RegularizerName | Regularizer | None,
        Component(
            default=None,
            names_method=True,
            meaning="None, ``l2``, ``l1``, ``fisher``, or a "
            ":class:`~torch_locoprop.regularizers.Regularizer` of your own.",
        ),
    ]
    local_decay: Annotated[
        LocalDecay,
        Choice(
            default="linear",
            names_method=True,
            choices=LOCAL_DECAYS,
            meaning="learning rate of iteration t: ``linear`` is ``lr · max(1 − t/T, 1/4)``, "
            "``constant`` is lr.",
        ),
    ]
    local_reduction: Annotated[
        LocalReduction,
        Choice(
            default="sum",
            names_method=True,
            choices=get_args(LocalReduction),
            meaning="``sum`` over the rows of a batch, as in the paper, or ``mean``, which makes the "
            "settings independent of the batch size and of the loss's reduction. A loss that sums "
            "must then be given as ``loss_fn``, or be returned as it is by a closure.",
        ),
    ]
    local_products: Annotated[
        LocalProducts,
        Choice(
            default="full",
            choices=get_args(LocalProducts),
            meaning="precision of matrix products in local iterations: ``full`` is torch's (in "
            "float32 on a GPU to a factor of two: three products in TF32), ``bf16`` allows products "
            "of bfloat16 where they are faster (on a GPU, linear layers; polar factors also on CPUs "
            "that have instructions for it). Weights and solver state keep their precision, and the "
            "first iteration, which is BackProp, has no product.",
        ),
    ]
    maximize: Annotated[
        bool,
        Switch(
            default=False,
            meaning="maximize the loss, with the default fallback too.",
        ),
    ]
    every: Annotated[
        int,
        Count(
            default=1,
            names_method=True,
            meaning="solve the local problems in every k-th step; the other steps are one iteration "
            "of the solver, which is BackProp (with ``exact``: of ``sgd``).",
        ),
    ]
    max_rows: Annotated[
        int | None,
        Count(
            default=None,
            optional=True,
            meaning="keep at most so many rows of each call of a layer, drawn at random; each counts "
            "for several. Every output position of a convolution is a row, and images are kept "
            "whole, at least one. The first local iteration uses the gradient of all rows. None "
            "keeps all.",
        ),
    ]
    gram: Annotated[
        GramStructure,
        Choice(
            default="full",
            choices=get_args(GramStructure),
            meaning="which entries of ``XᵀX`` LocoProp-S, its closed forms and the spectral step take: "
            "``full``, or an approximation for wide layers: ``block`` takes blocks on the diagonal, "
            "``diagonal`` the diagonal. A bias counts as one more column of X.",
        ),
    ]
    block_size: Annotated[
        int,
        Count(
            default=1024,
            meaning='for ``gram="block"``, the largest number of columns of a block. Layers with fewer '
            "columns are one block.",
        ),
    ]
    cap: Annotated[
        float | None,
        Number(
            default=None,
            may_equal=False,
            optional=True,
            meaning="longest displacement of a layer, weight and bias together, relative to the norm "
            "that ``cap_by`` names. None is no cap, and the cap has no effect if that "
            "norm is zero.",
        ),
    ]
    cap_by: Annotated[
        CapBy,
        Choice(
            default="weight",
            choices=get_args(CapBy),
            meaning="``weight``: the cap is relative to the norm of the layer's weight; with "
            '``apply="gradient"`` it bounds the step that ``outer`` takes, weight decay included. '
            "``backprop``: it is relative to the step ``lr · gamma · G``; with "
            '``apply="gradient"`` it bounds the gradient that ``outer`` is given; AdamW and '
            "Muon ignore its length.",
        ),
    ]
    gate: Annotated[
        bool,
        Switch(
            default=False,
            names_method=True,
            meaning="a layer whose local loss has risen, or whose solution is not finite, takes the "
            "BackProp step instead and loses its momentum. Costs one more product with all rows "
            "and, where the loss has a transfer, its integral in float64.",
        ),
    ]


def _declared(annotated: Any) -> Setting:
    return next(part for part in get_args(annotated) if isinstance(part, Setting))


SETTINGS: dict[str, Setting] = {
    "lr": _declared(Rate),
    **{
        name: _declared(annotated)
        for name, annotated in get_type_hints(Settings, include_extras=True).items()
    },
}


DEFAULTS: dict[str, Any] = {name: setting.default for name, setting in SETTINGS.items()}
LAYER_SETTINGS = tuple(name for name, setting in SETTINGS.items() if not setting.per_tensor)
PLAN_SETTINGS = tuple(name for name, setting in SETTINGS.items() if setting.in_plan)
OUTSIDE_PLAN = tuple(name for name in SETTINGS if name not in PLAN_SETTINGS)
GRAPH_KEY_SETTINGS = tuple(name for name, setting in SETTINGS.items() if setting.in_graph_key)


@dataclass(frozen=True)
class Guards:
    """The guards on local solutions, as one argument: ``LocoProp(model, guards=Guards(cap=0.1))``.

    The fields are the settings of the same names, which may also be given one by one. In a parameter
    group, ``guards`` replaces all three settings of the constructor.

    Args:
        cap: the longest displacement of a layer, relative to the norm that ``cap_by`` names.
        cap_by: ``"weight"`` or ``"backprop"``.
        gate: replace a solution that raises the local loss by the BackProp step.
    """

    cap: float | None = DEFAULTS["cap"]
    cap_by: CapBy = DEFAULTS["cap_by"]
    gate: bool = DEFAULTS["gate"]


def with_guards(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with ``guards=Guards(...)`` replaced by the settings it stands for.

    Raises:
        TypeError: if ``guards`` is not a :class:`Guards`.
        ValueError: if a setting is given both in ``guards`` and by itself.
    """
    found = dict(settings)
    guards = found.pop("guards", None)
    if guards is None:
        return found
    if not isinstance(guards, Guards):
        raise TypeError(f"Invalid guards={guards!r}. Must be a torch_locoprop.Guards.")
    both = [name for name in asdict(guards) if name in found]
    if both:
        raise ValueError(f"Given both in guards= and by itself: {', '.join(both)}. Give each once.")
    return found | asdict(guards)


def check_names(settings: Iterable[str], what: str, also: Iterable[str] = ()) -> None:
    """Raise ``ValueError`` for a name that is no setting.

    Args:
        settings: the names.
        what: how the message calls them.
        also: further names that are allowed.
    """
    for name in settings:
        if name not in SETTINGS and name not in also:
            raise ValueError(unknown(what, name, SETTINGS))
