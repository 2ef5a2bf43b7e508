"""K-FAC (Martens & Grosse 2015) for linear layers: the natural gradient with ``F ≈ A ⊗ D`` per layer.

``A = E[x̄ x̄ᵀ]`` ``[n+1, n+1]`` are the layer's inputs with a constant one for the bias, ``D = E[g gᵀ]``
``[d, d]`` the gradients of its pre-activations for labels drawn from the model itself. With G
``[d, n+1]`` the ordinary gradient, the direction is ``D⁻¹ G A⁻¹``, with both factors damped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn

from torch_locoprop.baselines.base import check_settings
from torch_locoprop.config.groups import Group, decayed
from torch_locoprop.paper import transfers
from torch_locoprop.paper.fisher import (
    PREDICTIVE,
    at_least_float32,
    cholesky,
    running_average,
    second_moment,
)
from torch_locoprop.paper.tensors import Tensors, join, split
from torch_locoprop.paper.transfers import Transfer
from torch_locoprop.recording import transfer_detection
from torch_locoprop.recording.hooks import Capture
from torch_locoprop.recording.layer_record import ServedLayer
from torch_locoprop.recording.model_scan import survey
from torch_locoprop.reporting.summary import table, unserved_row
from torch_locoprop.stepping.fallback_optimizer import FallbackFactory, WithFallback, check_recorded

# Steps that always renew the inverses. Martens & Grosse's Algorithm 2 has 3; where a batch has fewer
# rows than the layer has inputs, inverses from so few batches throw the next ones far off.
EARLY = 20


class KFAC(WithFallback):
    """Natural-gradient steps for every linear layer, and ``fallback`` for everything else.

    The loss should be the mean over rows of the negative log-likelihood that ``output_transfer``
    tells (for images, the sum over pixels): the Fisher matrix is that of one row. Another scale of
    the loss is another ``lr``. A layer called on sequences counts each position as a row.

    Args:
        model: the model, called as a whole: labels are drawn from its output.
        lr: the learning rate.
        momentum: heavy-ball momentum of the direction.
        decay: of the running averages A and D; in step k at most 1 − 1/k, so that they begin as
            plain means.
        damping: λ of the factored Tikhonov damping, :func:`damped_factors`.
        every: renew the inverses in the first 20 steps, where the averages change fast, and then in
            every k-th. The averages take in every step.
        weight_decay: decoupled; weights, not biases, shrink by ``1 − lr · weight_decay``.
        clip: bound on ``lr² ⟨direction, G⟩``, which is to second order twice the KL divergence
            between the predictions before and after; longer steps are shortened. None: no bound.
        output_transfer: the transfer inside the loss: ``sigmoid``, ``softmax`` or ``linear``, which
            predict Bernoulli variables, classes, and Gaussians of unit variance.
        loss_fn: the loss itself, from which ``output_transfer`` is read.
        fallback: makes the optimizer of the parameters outside linear layers. Without it they get
            ``AdamW(lr=1e-3)`` and you get a warning.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-2,  # η
        *,
        momentum: float = 0.9,  # μ
        decay: float = 0.95,
        damping: float = 1e-3,  # λ, the paper's ε
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
            "fallback": False,  # whose group it is
            "steps": 0,  # taken so far
        }
        given = {name: value for name, value in defaults.items() if (name, value) != ("clip", None)}
        check_settings(given, positive=("damping", "clip"))
        super().__init__([p for layer in self._layers for p in layer.given], defaults)
        served = set(self.param_groups[0]["params"])
        self._add_to_fallback([p for p in model.parameters() if p not in served], fallback)
        self._capture.draw_labels(0)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a natural-gradient step in every layer that has a gradient; then step the fallback."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        layers = [layer for layer in self._layers if layer.with_gradient]
        check_recorded(layers)
        group = self.param_groups[0]
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
        group["steps"] += 1
        self._capture.clear()
        self._capture.draw_labels(group["steps"])
        self._step_fallback()
        return loss

    def _direction(self, layer: ServedLayer, gradient: Tensor, group: Group) -> Tensor:
        """``D⁻¹ G A⁻¹`` of one layer. The first of its tensors keeps the factors."""
        trained = layer.with_gradient
        state = self.state[next(iter(trained.values()))]
        if "inputs" in state and state["inputs"].shape[-1] != gradient.shape[-1]:
            for name in ("inputs", "gradients", "inverse_inputs", "inverse_gradients"):
                del state[name]  # the bias was frozen, or thawed
        sampled = layer.sampled()
        if sampled is not None:
            x = layer.kind.inputs(layer.inputs(), "weight" in trained, "bias" in trained)
            decay = min(group["decay"], 1 - 1 / (group["steps"] + 1))
            for name, rows in (("inputs", x), ("gradients", sampled)):
                state[name] = running_average(state.get(name), second_moment(rows), decay)
        elif "inputs" not in state:
            raise RuntimeError(
                f"No Fisher matrix was sampled for layer {layer.name!r}. Call the model itself, "
                "model(x), so that labels can be drawn from its output."
            )
        steps = group["steps"]
        due = steps < EARLY or steps % group["every"] == 0
        if due or "inverse_inputs" not in state:
            state["inverse_inputs"], state["inverse_gradients"] = (
                torch.cholesky_inverse(cholesky(at_least_float32(factor))).to(factor.dtype)
                for factor in damped_factors(state["inputs"], state["gradients"], group["damping"])
            )
        direction: Tensor = state["inverse_gradients"] @ gradient @ state["inverse_inputs"]
        return direction

    def _move(self, layer: ServedLayer, direction: Tensor, group: Group) -> None:
        """Momentum, weight decay and the step itself, tensor by tensor."""
        trained = layer.with_gradient
        for name, part in split(direction, dict(trained)).items():
            parameter, state = trained[name], self.state[trained[name]]
            old = state.get("momentum", torch.zeros_like(parameter))
            state["momentum"] = group["momentum"] * old + part
            parameter.copy_(decayed(name, parameter, group) - group["lr"] * state["momentum"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._capture.clear()

    def summary(self) -> str:
        """A table of all modules with parameters: what trains them, and why not K-FAC."""
        rows: list[tuple[str, ...]] = []
        for layer in self._layers:
            shape = "×".join(map(str, layer.tensors["weight"].shape))
            note = "" if layer.trained else "frozen"
            rows.append((layer.name or "(model)", layer.kind.kind, shape, "–", "kfac", note))
        rows += [unserved_row(module, type(self._fallback).__name__) for module in self._unserved]
        total = sum(p.numel() for p in self._model.parameters())
        served = sum(p.numel() for p in self.param_groups[0]["params"])
        return table(rows, f"{len(rows)} modules; {served:,} of {total:,} parameters by K-FAC")

    # ---- torch.optim's contract ----------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the constructor adds groups."""
        if self.param_groups:
            raise ValueError(
                "KFAC trains the whole model it was made for. Freeze what should not move by "
                "requires_grad_(False); for a model that has grown, make a new KFAC."
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_model", "_output_transfer", "_fallback")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also the last act of ``load_state_dict``."""
        super().__setstate__(state)
        if "_model" in state:
            self._attach()
        self._link_fallback()
        self._capture.draw_labels(self.param_groups[0]["steps"])

    # ---- plumbing ------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Find the linear layers of the model and put the hooks on them."""
        every = set(self._model.parameters())
        self._layers, self._unserved = survey(self._model, every, kinds=nn.Linear)
        if not self._layers:
            raise ValueError("The model has no linear layer that K-FAC can serve.")
        for layer in self._layers:
            layer.needs = frozenset({"fisher"})
        self._capture = Capture(self._model, self._layers, self._output_transfer)


def damped_factors(A: Tensor, D: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """``A + π √λ I`` and ``D + √λ/π I`` with ``π² = mean(diag A) / mean(diag D)``.

    Martens & Grosse, Section 6.3: the product is ``A ⊗ D + λ I`` and two cross terms, and this π
    minimises a bound on those, in the trace norm. Where a factor is zero, π = 1.
    """
    diagonals = [factor.diagonal(dim1=-2, dim2=-1) for factor in (A, D)]
    sizes = [diagonal.mean(-1)[..., None, None] for diagonal in diagonals]
    degenerate = (sizes[0] <= 0) | (sizes[1] <= 0)
    pi = torch.where(degenerate, 1.0, (sizes[0] / sizes[1]).sqrt())
    ridges = (pi * damping**0.5, damping**0.5 / pi)
    return (
        A + ridges[0] * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device),
        D + ridges[1] * torch.eye(D.shape[-1], dtype=D.dtype, device=D.device),
    )


def clip_scale(directions: list[Tensor], gradients: list[Tensor], lr: float, clip: float) -> Tensor:
    """``min(1, √(clip / lr² Σ⟨direction, G⟩))``: ⟨direction, G⟩ is the step's squared Fisher norm."""
    products = [(v * g).sum() for v, g in zip(directions, gradients, strict=True)]
    norm = torch.stack([product.to(products[0].device) for product in products]).sum()
    return (clip / (lr**2 * norm)).sqrt().clamp_max(1.0)


def _gradients(layer: ServedLayer) -> Tensors:
    return {name: p.grad for name, p in layer.with_gradient.items() if p.grad is not None}


def _predictive(output_transfer: str | Transfer | None, loss_fn: object) -> Transfer:
    """The transfer that tells the predictive distribution."""
    transfer = None if output_transfer is None else transfers.get(output_transfer)
    if transfer is None and loss_fn is not None:
        transfer = transfer_detection.transfer_inside(loss_fn)
    if transfer is None or transfer.name not in PREDICTIVE:
        raise ValueError(
            f"Invalid output_transfer={transfer.name if transfer else None!r}. K-FAC draws labels "
            "from the model's predictive distribution; say which by loss_fn=, or by "
            f"output_transfer= ({', '.join(PREDICTIVE)})."
        )
    return transfer
