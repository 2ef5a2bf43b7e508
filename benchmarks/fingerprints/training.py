"""Train one model for a few steps and return the digests of the result."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.fingerprints.cases import BASE, EXACT, Case
from benchmarks.fingerprints.digests import digest
from benchmarks.fingerprints.models import ACTIVATIONS, MODELS
from torch_locoprop import LocoProp, baselines, regularizers, solvers, transfers, variants
from torch_locoprop.study.models.autoencoder import deep_autoencoder
from torch_locoprop.study.training.population import Method, Population

Wrap = Callable[[nn.Module], nn.Module]


def fingerprint(case: Case) -> dict[str, str]:
    """Train by a case and return the digests of weights, state, losses and diagnostics."""
    with quiet():
        if case.optimizer == "population":
            return population_fingerprint(case)
        run = Run(case)
        run.train()
        return run.digests()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, and forget compiled graphs: they would add up over hundreds of runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


class Run:
    """One model, its optimizer and the losses so far.

    Args:
        case: what to train and how.
        wrap: what is called in place of the model; the identity unless given.
        part: the rows of each batch that this process trains on.
    """

    def __init__(
        self, case: Case, wrap: Wrap = lambda model: model, part: slice = slice(None)
    ) -> None:
        self.case, self.part, self.kind = case, part, MODELS[case.model]
        self.model = self.build()
        self.called = wrap(self.model)
        if case.loop.startswith("compile"):
            self.called = torch.compile(self.model, backend=case.loop.split()[1])  # type: ignore[assignment]
        self.optimizer = optimizer(case, self.model)
        self.losses: list[Tensor] = []

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.kind.build(ACTIVATIONS[self.case.transfer])
        return model.to(getattr(torch, self.case.dtype))

    def train(self) -> None:
        """Take all steps."""
        schedule = None
        if self.case.loop == "schedule":
            schedule = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: 1 / (1 + step)
            )
        for step in range(self.case.steps):
            if step == self.case.steps // 2:
                self.interrupt()
            self.step(*self.batch(step))
            if schedule is not None:
                schedule.step()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of one step."""
        generator = torch.Generator().manual_seed(100 + step)
        rows, outputs = self.kind.rows, self.kind.outputs
        if self.case.loop == "last batch smaller" and step == self.case.steps - 1:
            rows = rows // 3
        x = torch.rand(rows, *self.kind.shape, generator=generator).to(
            getattr(torch, self.case.dtype)
        )
        y = torch.rand(rows, outputs, generator=generator).to(x)
        if self.case.output == "softmax":
            y = y.argmax(-1)
        return x[self.part], y[self.part]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loop = self.case.loop
        with torch.autocast("cpu", torch.bfloat16, enabled=loop == "autocast"):
            if loop == "checkpoint":
                output = checkpoint(self.called, x, use_reentrant=False)
            else:
                output = self.called(x)
        if loop == "autocast":
            output = output.float()
        if self.case.output == "softmax":
            return F.cross_entropy(output, y)
        if self.case.output == "linear":
            return F.mse_loss(output, y)
        return F.binary_cross_entropy_with_logits(output, y, reduction="sum") / len(output)

    def step(self, x: Tensor, y: Tensor) -> None:
        """Take one training step as the case's loop has it."""
        loop, own = self.case.loop, self.optimizer
        if loop == "closure":
            self.losses.append(own.step(self.closure(x, y)).detach())
            return
        scaler = torch.amp.GradScaler("cpu", enabled=loop == "scaler")
        parts = (
            list(zip(x.chunk(2), y.chunk(2), strict=True)) if loop == "accumulation" else [(x, y)]
        )
        for number, (some, theirs) in enumerate(parts):
            if isinstance(self.called, DistributedDataParallel):
                self.called.require_backward_grad_sync = number == len(parts) - 1
            loss = self.loss(some, theirs) / len(parts)
            if loop == "zero before backward":
                own.zero_grad()
            if loop == "two losses":
                (loss / 4).backward(retain_graph=True)
                loss = loss * 3 / 4
            scaler.scale(loss).backward()
            self.losses.append(loss.detach())
        if loop == "clip":
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if loop == "evaluation":
            with torch.no_grad():
                self.losses.append(self.loss(x, y))
        scaler.step(own)
        if loop != "zero before backward":
            own.zero_grad()

    def closure(self, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
        def computed() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            return loss

        return computed

    def interrupt(self) -> None:
        """Do what the loop does once, in the middle of the run."""
        if self.case.loop == "resume":
            file = io.BytesIO()
            torch.save((self.model.state_dict(), self.optimizer.state_dict()), file)
            file.seek(0)
            weights, state = torch.load(file)
            self.model = self.called = self.build()
            self.model.load_state_dict(weights)
            self.optimizer = optimizer(self.case, self.model)
            self.optimizer.load_state_dict(state)
        elif self.case.loop == "copy":
            self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
            self.called = self.model
        elif self.case.loop == "changed settings":
            self.optimizer.param_groups[0].update(gamma=1.0, local_steps=2, solver="sgd")
        elif self.case.loop == "frozen later":
            next(self.model.parameters()).requires_grad_(False)

    def digests(self) -> dict[str, str]:
        """Return the digests of the weights, the optimizer's state and the losses."""
        saved = self.optimizer.state_dict()
        state = {name: entry for name, entry in saved.items() if name != "param_groups"}
        found = {
            "weights": digest(self.model.state_dict()),
            "state": digest(state),
            "losses": digest(self.losses),
        }
        if self.case.settings.get("diagnose"):
            found["diagnostics"] = digest(
                [
                    [
                        getattr(row, field.name)
                        for field in fields(row)
                        if field.name != "milliseconds"
                    ]
                    for row in self.optimizer.diagnostics()
                ]
            )
        return found


def optimizer(case: Case, model: nn.Module) -> Any:
    """Make the optimizer of a case."""
    settings = dict(case.settings)
    if callable(settings.get("param_groups")):
        settings["param_groups"] = settings["param_groups"](model)
    if case.optimizer == "locoprop":
        return LocoProp(model, **{**BASE, "output_transfer": case.output, **settings})
    cls = getattr(baselines, case.optimizer)
    if case.optimizer == "KFAC":
        return cls(model, output_transfer=case.output, **settings)
    return cls(model.parameters(), **settings)


def population_fingerprint(case: Case) -> dict[str, str]:
    """Train three autoencoders together, at different learning rates."""
    own = {**BASE, **case.settings}
    known = {**solvers.SOLVERS, **EXACT}
    method = Method(
        variants.VARIANTS[own["variant"]],
        known[own["solver"]],
        own["local_steps"],
        own["local_decay"],
        regularizers.REGULARIZERS[own["regularizer"] or "none"],
        own["local_reduction"],
    )
    models = [
        deep_autoencoder((10, 8, 3), generator=torch.Generator().manual_seed(member))
        for member in range(3)
    ]
    tanh, linear, sigmoid = (transfers.get(name) for name in ("tanh", "linear", "sigmoid"))
    numbers = [
        {name: own[name] for name in ("gamma", "momentum", "decay", "eps")}
        | {"lr": own["lr"] * 2**member, "weight_decay": 0.1 * member}
        for member in range(3)
    ]
    together = Population(
        [model.to(getattr(torch, case.dtype)) for model in models],
        (tanh, linear, tanh, sigmoid),
        method,
        numbers,
    )
    losses = []
    for step in range(case.steps):
        generator = torch.Generator().manual_seed(100 + step)
        images = torch.rand(16, 10, generator=generator).to(getattr(torch, case.dtype))
        together.step(images)
        losses.append(together.losses(images))
    together.keep([2, 0])
    together.step(images)
    return {
        "weights": digest(together.layers),
        "state": digest([together.states, together.skips]),
        "losses": digest(losses),
    }
