"""K-FAC (Martens & Grosse 2015) for linear layers.

K-FAC is the natural gradient with the Fisher matrix of a layer approximated by ``A ⊗ D``:

    A = E[x̄ x̄ᵀ]  [n+1, n+1]   x̄: a layer's input and a constant one for the bias
    D = E[g gᵀ]  [d, d]       g: the gradient of its pre-activation, for labels drawn from the model

For the gradient G ``[d, n+1]`` of the loss, the direction of the step is ``D⁻¹ G A⁻¹``, with both
factors damped. The formulas of the damping and of the clipping are in ``kronecker_factors.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from torch_locoprop.baselines.base import check_settings
from torch_locoprop.baselines.kronecker_factors import clip_scale, damped_inverses
from torch_locoprop.config.groups import Group
from torch_locoprop.paper import transfers
from torch_locoprop.paper.fisher import PREDICTIVE, running_average, second_moment
from torch_locoprop.paper.tensors import Tensors, join, split
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording import row_gradients
from torch_locoprop.recording.hooks import ModelHooks
from torch_locoprop.recording.layer_record import LayerRecord
from torch_locoprop.recording.loss_inspection import transfer_inside
from torch_locoprop.recording.model_scan import scan
from torch_locoprop.reporting.summary import HEADER, table, unserved_row
from torch_locoprop.stepping.build_problem import decayed
from torch_locoprop.stepping.fallback_optimizer import FallbackFactory, WithFallback, check_recorded

# Number of first steps that always compute the inverses. Martens & Grosse's Algorithm 2 has 3. If a
# batch has fewer rows than the layer has inputs, inverses from so few batches are far off later on.
EARLY = 20


class KFAC(WithFallback):
    """K-FAC (Eq. 14) for every ``nn.Linear`` of a model; ``fallback`` trains all other parameters.

    The loss should be the mean over rows of the negative log-likelihood, which for images is a sum
    over pixels: the Fisher matrix is that of one row. A loss of another scale needs another ``lr``.
    For a layer that is called on sequences, each position is a row.

    Args:
        model: the model. Call ``model(x)`` itself and not only its parts: K-FAC draws labels from the
            output.
        lr: learning rate η.
        momentum: factor μ of heavy-ball momentum.
        decay: factor of the running averages A and D. In step k it is at most ``1 − 1/k``, so that the
            first averages are plain means.
        damping: λ of the factored Tikhonov damping: about √λ is added to the diagonals of A and D.
        every: compute the inverses in each of the first 20 steps, while A and D change fast, and then
            in every k-th step. A and D are updated in every step.
        weight_decay: decoupled weight decay: weights are multiplied by ``1 − lr · weight_decay``
            before the step, biases are not.
        clip: upper bound of ``lr² ⟨direction, G⟩``, summed over layers; longer steps are scaled down
            to it. To second order this is twice the KL divergence between the predictions before and
            after the step. None: no bound.
        output_transfer: the transfer function inside the loss. ``sigmoid``: the model predicts
            Bernoulli variables; ``softmax``: classes; ``linear``: Gaussians of unit variance.
        loss_fn: the loss function; ``output_transfer`` is read from it.
        fallback: function from the list of parameters outside linear layers to their optimizer. The
            default is ``AdamW(lr=1e-3)``, with a warning.

    Raises:
        ValueError: a setting is invalid, the model has no linear layer, or neither
            ``output_transfer`` nor ``loss_fn`` names one of the three distributions.

    Example::

        optimizer = baselines.KFAC(model, lr=1e-2, loss_fn=nn.CrossEntropyLoss(), every=10)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-2,  # η
        *,
        momentum: float = 0.9,  # μ
        decay: float = 0.95,
        damping: float = 1e-3,  # λ; ε in the LocoProp paper
        every: int = 1,
        weight_decay: float = 0.0,
        clip: float | None = None,
        output_transfer: str | Transfer | None = None,
        loss_fn: Callable[..., Any] | None = None,
        fallback: FallbackFactory | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"KFAC takes the model itself, not {type(model).__name__}: the factors need the "
                "inputs and gradients of its layers. Pass the nn.Module."
            )
        self._model = model
        self._output_transfer = _predictive(output_transfer, loss_fn)
        self._fallback = None
        self._attach()
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "decay": decay,
            "damping": damping,
            "every": every,
            "weight_decay": weight_decay,
            "clip": clip,
            "fallback": False,  # True in the groups that the fallback trains
            "steps": 0,  # number of steps taken
        }
        given = {name: value for name, value in defaults.items() if (name, value) != ("clip", None)}
        check_settings(given, positive=("damping", "clip"))
        super().__init__([p for layer in self._layers for p in layer.given], defaults)
        served = set(self.param_groups[0]["params"])
        self._add_to_fallback([p for p in model.parameters() if p not in served], fallback)
        self._hooks.labels.draw_before(0)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a K-FAC step for every linear layer with a gradient, then a step of the fallback.

        Args:
            closure: computes the gradients and returns the loss, as in ``torch.optim``.

        Returns:
            The loss that the closure returned, or None without one.

        Raises:
            RuntimeError: no backward pass was recorded since the last step, the model's output was
                not recorded, so that no labels could be drawn, or parameters were taken out of the
                groups.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        layers = [layer for layer in self._layers if layer.with_gradient]
        check_recorded(layers)
        group = self.param_groups[0]
        if len(group["params"]) < sum(len(layer.given) for layer in self._layers):
            raise RuntimeError(
                "Parameters were taken out of param_groups, and KFAC trains the whole model it was "
                "made for. Freeze them with requires_grad_(False)."
            )
        with layers[0].in_own_precision():
            self._step_layers(layers, group)
        group["steps"] += 1
        self._hooks.clear()
        self._hooks.labels.draw_before(group["steps"])
        self._step_fallback()
        return loss

    def _step_layers(self, layers: Sequence[LayerRecord], group: Group) -> None:
        """Compute the directions of all layers, bound their length together, and move the weights."""
        gradients = [join(_gradients(layer)) for layer in layers]
        directions = [
            self._direction(layer, gradient, group)
            for layer, gradient in zip(layers, gradients, strict=True)
        ]
        if group["clip"] is not None:
            scale = clip_scale(directions, gradients, group["lr"], group["clip"])
            directions = [direction * scale.to(direction.device) for direction in directions]
        for layer, direction in zip(layers, directions, strict=True):
            self._move(layer, direction, group)

    def _direction(self, layer: LayerRecord, gradient: Tensor, group: Group) -> Tensor:
        """Return ``D⁻¹ G A⁻¹`` of one layer; update A, D and, if it is time, their inverses.

        The state of the layer's first trained tensor holds the factors and their inverses.
        """
        trained = layer.with_gradient
        state = self.state[next(iter(trained.values()))]
        if "inputs" in state and len(state["inputs"]) != gradient.shape[-1]:
            for name in ("inputs", "gradients", "inverse_inputs", "inverse_gradients"):
                del state[name]  # requires_grad of the bias was changed, so A has another size
        sampled = row_gradients.sampled(layer)
        if sampled is not None:
            x = layer.kind.linear_map.inputs(layer.inputs(), "weight" in trained, "bias" in trained)
            decay = min(group["decay"], 1 - 1 / (group["steps"] + 1))
            for name, rows in (("inputs", x), ("gradients", sampled)):
                state[name] = running_average(state.get(name), second_moment(rows), decay)
        elif "inputs" not in state:
            raise RuntimeError(
                f"No Fisher matrix was sampled for layer {layer.name!r}. Call the model itself, "
                "model(x), so that labels can be drawn from its output."
            )
        steps = group["steps"]
        every = group["every"]
        # Also after a multiple of k in which the layer had no gradient.
        due = steps < EARLY or steps // every > state.get("renewed", 0) // every
        if due or "inverse_inputs" not in state:
            state["renewed"] = steps
            state["inverse_inputs"], state["inverse_gradients"] = damped_inverses(
                state["inputs"], state["gradients"], group["damping"]
            )
        direction: Tensor = state["inverse_gradients"] @ gradient @ state["inverse_inputs"]
        return direction

    def _move(self, layer: LayerRecord, direction: Tensor, group: Group) -> None:
        """Update weight and bias of one layer: momentum, weight decay, step."""
        trained = layer.with_gradient
        for name, part in split(direction, dict(trained)).items():
            parameter, state = trained[name], self.state[trained[name]]
            old = state.get("momentum", torch.zeros_like(parameter))
            state["momentum"] = group["momentum"] * old + part
            parameter.copy_(decayed(name, parameter, group) - group["lr"] * state["momentum"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._hooks.clear()

    def summary(self) -> str:
        """Return a table of all modules with parameters: which optimizer trains each, and why."""
        rows: list[tuple[str, ...]] = []
        for layer in self._layers:
            shape = "×".join(map(str, layer.tensors["weight"].shape))
            note = "" if layer.trained else "frozen"
            rows.append((layer.name or "(model)", layer.kind.kind, shape, "–", "kfac", note))
        rows += [unserved_row(module, type(self._fallback).__name__) for module in self._unserved]
        total = sum(p.numel() for p in self._model.parameters())
        served = sum(p.numel() for p in self.param_groups[0]["params"])
        last = f"{len(rows)} modules; {served:,} of {total:,} parameters by K-FAC"
        return f"{table(rows, HEADER)}\n\n{last}"

    # ---- torch.optim's contract ----------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ``ValueError``: K-FAC has one parameter group, which the constructor makes."""
        if self.param_groups:
            raise ValueError(
                "KFAC trains the whole model it was made for. Freeze parameters with "
                "requires_grad_(False); after adding layers to the model, make a new KFAC."
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_model", "_output_transfer", "_fallback")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer; ``load_state_dict`` calls this too."""
        super().__setstate__(state)
        if "_model" in state:
            self._attach()
        self._link_fallback()
        self._hooks.labels.draw_before(self.param_groups[0]["steps"])

    # ---- plumbing ------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Find the linear layers of the model and register the hooks that record them."""
        every = set(self._model.parameters())
        self._layers, self._unserved = scan(self._model, every, kinds=nn.Linear)
        if not self._layers:
            raise ValueError("The model has no linear layer that K-FAC can serve.")
        for layer in self._layers:
            layer.needs = frozenset({"fisher"})
        self._hooks = ModelHooks(self._model, self._layers, self._output_transfer)


def _gradients(layer: LayerRecord) -> Tensors:
    return {name: p.grad for name, p in layer.with_gradient.items() if p.grad is not None}


def _predictive(output_transfer: str | Transfer | None, loss_fn: object) -> Transfer:
    """Return the transfer function inside the loss; it determines the predictive distribution."""
    transfer = None if output_transfer is None else transfers.get(output_transfer)
    if transfer is None and loss_fn is not None:
        transfer = transfer_inside(loss_fn)
    if transfer is None or transfer.name not in PREDICTIVE:
        raise ValueError(
            f"Invalid output_transfer={transfer.name if transfer else None!r}. K-FAC draws labels "
            "from the model's predictive distribution: give loss_fn=, or output_transfer= as one "
            f"of {', '.join(PREDICTIVE)}."
        )
    return transfer
