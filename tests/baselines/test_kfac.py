"""K-FAC equals a dense computation with explicit Kronecker products."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from baselines.checks import backward, check_learns, check_resumes, saved_and_loaded, train
from cases import assert_close, batch, cross_entropy, network, weights
from torch import Tensor, nn
from torch.optim import lr_scheduler

from torch_locoprop.baselines import KFAC
from torch_locoprop.baselines.kronecker_factors import (
    clip_scale,
    damped_factors,
    damped_inverses,
)
from torch_locoprop.recording import row_gradients


def make(**options: Any) -> tuple[nn.Sequential, KFAC]:
    model = network()
    return model, KFAC(model, **{"lr": 0.1, "output_transfer": "sigmoid", **options})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Half-precision factors are inverted in float32; only the result is rounded."""
    model = network().to(dtype)
    opt = KFAC(model, lr=0.02, damping=0.1, output_transfer="sigmoid")
    x = batch(7, 6).to(dtype)
    F.binary_cross_entropy_with_logits(model(x), x[:, :3]).backward()
    opt.step()
    state = opt.state[model[0].weight]
    exact = damped_factors(state["inputs"].float(), state["gradients"].float(), 0.1)
    for name, factor in zip(("inverse_inputs", "inverse_gradients"), exact, strict=True):
        inverse = factor.inverse()
        assert (state[name].float() - inverse).norm() < 2 * torch.finfo(dtype).eps * inverse.norm()


def dense_direction(a: Tensor, d: Tensor, joint: Tensor, damping: float) -> Tensor:
    """Return ``(A_damped ⊗ D_damped)⁻¹ vec(G)``; vec stacks the columns of G ``[d, n(+1)]``."""
    pi = ((a.trace() / len(a)) / (d.trace() / len(d))).sqrt()
    a = a + pi * damping**0.5 * torch.eye(len(a)).double()
    d = d + damping**0.5 / pi * torch.eye(len(d)).double()
    solved = torch.linalg.solve(torch.kron(a, d), joint.mT.reshape(-1))
    return solved.reshape(joint.mT.shape).mT


def recorded(
    model: nn.Sequential, opt: KFAC, x: Tensor, transfer: str = "sigmoid"
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return A and D of each layer for this batch, and the gradient of ``[W b]``.

    Of what the optimizer has recorded, only the drawn labels are read. A forward pass of its own and
    autograd with these labels give the inputs and gradients of all layers.
    """
    inputs, outputs = [], []
    a = x.reshape(-1, x.shape[-1])
    for module in model:
        if isinstance(module, nn.Linear):
            inputs.append(a.detach())
            a = F.linear(a, module.weight, module.bias)
            outputs.append(a)
        else:
            a = module(a)
    y_hat = {"sigmoid": torch.sigmoid, "softmax": lambda a: a.softmax(-1)}.get(
        transfer, lambda a: a
    )
    labels = y_hat(a).detach() - row_gradients.sampled(opt._layers[-1])
    if transfer != "linear":
        assert torch.minimum(labels.abs(), (labels - 1).abs()).max() < 1e-12
    if transfer == "softmax":
        assert_close([labels.sum(-1)], [torch.ones(len(labels)).double()])
    nll = {
        "sigmoid": lambda: F.binary_cross_entropy_with_logits(a, labels, reduction="sum"),
        "softmax": lambda: F.cross_entropy(a, labels, reduction="sum"),
        "linear": lambda: 0.5 * (a - labels).square().sum(),
    }[transfer]()
    found = []
    gradients = torch.autograd.grad(nll, outputs)
    layers = [module for module in model if isinstance(module, nn.Linear)]
    for module, rows, g in zip(layers, inputs, gradients, strict=True):
        gradient = module.weight.grad
        if module.bias is not None:
            rows = torch.cat([rows, torch.ones(len(rows), 1).double()], 1)
            gradient = torch.cat([gradient, module.bias.grad[:, None]], 1)
        found.append((rows.mT @ rows / len(rows), g.mT @ g / len(g), gradient))
    return found


def joints(model: nn.Sequential) -> list[Tensor]:
    """Return ``[W b]`` of every layer."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    return [
        torch.cat([m.weight] + ([] if m.bias is None else [m.bias[:, None]]), 1).detach().clone()
        for m in layers
    ]


# ---- the update ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("output_transfer", ["sigmoid", "softmax", "linear"])
def test_one_step_is_the_dense_kronecker_solve(bias: bool, output_transfer: str) -> None:
    model = network(bias=bias)
    opt = KFAC(model, lr=0.1, damping=0.02, output_transfer=output_transfer)
    before = joints(model)
    backward(model)
    factors = recorded(model, opt, batch(7, 6), output_transfer)
    directions = [dense_direction(a, d, gradient, 0.02) for a, d, gradient in factors]
    opt.step()
    assert_close(
        joints(model), [w - 0.1 * v for w, v in zip(before, directions, strict=True)], 1e-10
    )


def test_the_rows_of_d_are_gradients_for_labels_drawn_from_the_model() -> None:
    """The output layer's rows give the drawn labels; autograd with them gives all other layers' g."""
    model, opt = make()
    backward(model)
    sampled = [row_gradients.sampled(layer) for layer in opt._layers]
    pre_activations: list[Tensor] = []
    a = batch(7, 6)
    for module in model:
        a = module(a)
        if isinstance(module, nn.Linear):
            a.retain_grad()
            pre_activations.append(a)
    labels = torch.sigmoid(a).detach() - sampled[2]
    assert torch.logical_or(labels.abs() < 1e-12, (labels - 1).abs() < 1e-12).all()
    assert 0 < labels.mean() < 1
    F.binary_cross_entropy_with_logits(a, labels, reduction="sum").backward()
    assert_close(sampled, [p.grad for p in pre_activations], 1e-10)


def follow(
    model: nn.Sequential,
    opt: KFAC,
    steps: int,
    *,
    lr: float,
    momentum: float,
    decay: float,
    damping: float,
    every: int = 1,
    weight_decay: float = 0.0,
    clip: float = math.inf,
) -> list[float]:
    """Check that each step equals a dense implementation; return the factors of the clipping."""
    averages: list[tuple[Tensor, Tensor]] = []
    used: list[tuple[Tensor, Tensor]] = []
    scales: list[float] = []
    velocity = [torch.zeros_like(joint) for joint in joints(model)]
    for step in range(steps):
        backward(model, seed=step)
        fresh = recorded(model, opt, batch(7, 6, seed=step))
        keep = min(decay, 1 - 1 / (step + 1))  # Martens & Grosse: a plain mean at first
        if step == 0:
            averages = [(a, d) for a, d, _ in fresh]
        else:
            averages = [
                (keep * a + (1 - keep) * new_a, keep * d + (1 - keep) * new_d)
                for (a, d), (new_a, new_d, _) in zip(averages, fresh, strict=True)
            ]
        if step < 20 or step % every == 0:
            used = averages
        gradients = [gradient for _, _, gradient in fresh]
        directions = [
            dense_direction(*factors, gradient, damping)
            for factors, gradient in zip(used, gradients, strict=True)
        ]
        norm = sum((v * g).sum().item() for v, g in zip(directions, gradients, strict=True))
        scales.append(min(1.0, (clip / (lr**2 * norm)) ** 0.5))
        expected = joints(model)
        for k, direction in enumerate(directions):
            velocity[k] = momentum * velocity[k] + scales[-1] * direction
            expected[k][:, :-1] *= 1 - lr * weight_decay
            expected[k] -= lr * velocity[k]
        opt.step()
        opt.zero_grad()
        assert_close(joints(model), expected, 1e-9)
    return scales


def test_running_averages_inverses_every_k_steps_momentum_and_weight_decay() -> None:
    """Thirty steps equal a dense implementation; the inverses of step 20 are used until step 27."""
    options = {"lr": 0.02, "momentum": 0.5, "decay": 0.8, "damping": 0.1}
    model, opt = make(**options, every=9, weight_decay=0.1)
    follow(model, opt, 30, **options, every=9, weight_decay=0.1)


def test_each_of_the_first_twenty_steps_computes_the_inverses() -> None:
    model, opt = make(every=1000)
    inverses = []
    for seed in range(23):
        opt.zero_grad()
        backward(model, seed)
        opt.step()
        inverses.append(opt.state[model[0].weight]["inverse_inputs"].clone())
    assert [torch.equal(*pair) for pair in pairwise(inverses)] == 19 * [False] + 3 * [True]


def test_defaults() -> None:
    model = network()
    opt = KFAC(model, output_transfer="sigmoid")
    follow(model, opt, 25, lr=1e-2, momentum=0.9, decay=0.95, damping=1e-3)


def test_rows_of_several_calls_and_of_sequences_count_alike() -> None:
    """A and D are means over all rows of two accumulated batches, or of one batch of sequences."""
    model, opt = make()
    x = batch(4, 3, 6)
    cross_entropy(model(x), x[..., :3]).backward()
    g = row_gradients.sampled(opt._layers[1])
    opt.step()
    state = opt.state[model[2].weight]
    assert g.shape == (12, 4)
    assert_close([state["gradients"]], [g.mT @ g / 12])

    model, opt = make()
    backward(model, seed=1)
    backward(model, seed=2)
    inputs = torch.cat([batch(7, 6, seed=1), batch(7, 6, seed=2)])
    rows = torch.cat([inputs, torch.ones(14, 1).double()], 1)
    opt.step()
    assert_close([opt.state[model[0].weight]["inputs"]], [rows.mT @ rows / 14])


def test_factored_damping() -> None:
    """The product is the Fisher matrix plus λI and cross terms; π equalises the mean diagonals."""
    roots = batch(4, 4), batch(3, 3, seed=2)
    a, d = (root @ root.mT for root in roots)
    damped_a, damped_d = damped_factors(a, d, 0.01)
    pi = ((a.trace() / 4) / (d.trace() / 3)).sqrt()
    eye_a, eye_d = torch.eye(4).double(), torch.eye(3).double()
    cross = torch.kron(a, eye_d) * 0.1 / pi + torch.kron(eye_a, d) * 0.1 * pi
    expected = torch.kron(a, d) + 0.01 * torch.eye(12).double() + cross
    assert_close([torch.kron(damped_a, damped_d)], [expected])


def test_a_layer_without_gradients_is_damped_by_the_identity() -> None:
    damped_a, damped_d = damped_factors(torch.ones(2, 2), torch.zeros(3, 3), 0.01)
    assert_close([damped_a, damped_d], [torch.ones(2, 2) + 0.1 * torch.eye(2), 0.1 * torch.eye(3)])


@pytest.mark.parametrize("leading", [(), (2,), (2, 5)], ids=str)
def test_damping_of_each_member(leading: tuple[int, ...]) -> None:
    """``A + π √λ I`` and ``D + √λ/π I``; π is 1 where a factor is zero."""
    roots = batch(*leading, 4, 4) - 0.5, batch(*leading, 3, 3, seed=2) - 0.5
    a, d = (root @ root.mT for root in roots)
    for zero in (None, a, d):
        if zero is not None:
            zero[(0,) * len(leading)] = 0
        pi = (a.diagonal(dim1=-2, dim2=-1).mean(-1) / d.diagonal(dim1=-2, dim2=-1).mean(-1)).sqrt()
        pi = torch.where((pi > 0) & pi.isfinite(), pi, 1.0)[..., None, None]
        expected = a + 0.1 * pi * torch.eye(4).double(), d + 0.1 / pi * torch.eye(3).double()
        assert_close(list(damped_factors(a, d, 0.01)), list(expected))
        inverses = [torch.linalg.inv(factor) for factor in expected]
        assert_close(list(damped_inverses(a, d, 0.01)), inverses, 1e-10)


@pytest.mark.parametrize("leading", [(2,), (2, 5)], ids=str)
def test_inverses_of_members_of_which_one_rounds_to_an_indefinite_one(
    leading: tuple[int, ...],
) -> None:
    basis = torch.linalg.qr(batch(4, 4)).Q
    values = torch.tensor([0.5, 0.5, 1.0, 2.0]).double().repeat(*leading, 1)
    values[(0,) * len(leading)] = torch.tensor([-1e-6, 0.0, 1.0, 3.0])
    a = basis * values.unsqueeze(-2) @ basis.mT
    d = torch.eye(3).double().expand(*leading, 3, 3)  # all mean diagonals are 1: π = 1
    found = damped_inverses(a, d, 1e-14)
    values = (values + 1e-7).clamp_min(1e-7)
    assert_close([found[0]], [basis / values.unsqueeze(-2) @ basis.mT], 1e-6)
    assert_close([found[1]], [d / (1 + 1e-7)], 1e-9)


# ---- clipping --------------------------------------------------------------------------------------


def test_clip_bounds_the_directions_in_the_fisher_norm() -> None:
    """In each step all directions are scaled by the ν for which ``lr² ν² Σ⟨v, G⟩`` is the bound.

    Momentum adds up the scaled directions; steps within the bound are not scaled.
    """
    options = {"lr": 0.1, "momentum": 0.9, "decay": 0.95, "damping": 0.1, "clip": 2e-3}
    model, opt = make(**options)
    scales = follow(model, opt, 12, **options)
    assert min(scales) < 0.8
    assert max(scales) == 1.0


def test_clip_leaves_short_steps_alone() -> None:
    direction, gradient = batch(3, 2), batch(3, 2, seed=2)
    assert clip_scale([direction], [gradient], 0.1, 1e6) == 1
    assert clip_scale([direction], [0 * gradient], 0.1, 1e-6) == 1
    assert clip_scale([direction], [gradient], 0.0, 1e-6) == 1


def test_a_product_that_rounds_below_zero_is_clipped_by_its_magnitude() -> None:
    """``⟨D⁻¹GA⁻¹, G⟩ >= 0`` in exact arithmetic; a negative value is the size of the rounding error."""
    one = torch.ones(2, 2)
    assert clip_scale([-one], [one], 0.5, 0.25).item() == 0.5  # √(0.25 / (0.5² · 4))
    assert clip_scale([one, -one], [one, one], 0.5, 0.25).item() == pytest.approx(0.125**0.5)


@pytest.mark.parametrize("seed", range(6))
def test_damping_below_the_rounding_error_keeps_steps_finite(seed: int) -> None:
    """Dead inputs and fewer rows than inputs, in float32, with a ridge of 1e-7."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 3))
    opt = KFAC(model, lr=0.1, damping=1e-14, clip=1e-2, output_transfer="sigmoid")
    x = torch.rand(20, 100)
    x[:, 70:] = 0
    for _ in range(6):
        before = weights(model)
        F.binary_cross_entropy_with_logits(model(x), x[:, :3], reduction="sum").div(20).backward()
        opt.step()
        opt.zero_grad()
        moved = max((b - a).abs().max() for a, b in zip(before, weights(model), strict=True))
        assert 0 < moved < math.inf


def test_inverses_of_factors_that_round_to_indefinite_ones() -> None:
    """Eigenvalues below the ridge are set to it; those above keep their inverses."""
    basis = torch.linalg.qr(batch(4, 4)).Q
    a = basis * torch.tensor([-1e-6, 0.0, 1.0, 3.0]).double() @ basis.mT
    d = torch.eye(3).double()  # both mean diagonals are 1: π = 1
    inverse_a, inverse_d = damped_inverses(a, d, 1e-14)
    values = torch.tensor([1e-7, 1e-7, 1.0 + 1e-7, 3.0 + 1e-7]).double()
    assert_close([inverse_a], [basis / values @ basis.mT], 1e-6)
    assert_close([inverse_d], [d / (1 + 1e-7)], 1e-9)


# ---- what the method promises ----------------------------------------------------------------------


def test_linear_regression_converges_in_a_few_steps_whatever_the_conditioning() -> None:
    """One linear layer, unit-variance Gaussian: the Hessian is ``A ⊗ I`` and the Fisher equals it.

    A is exact on a full batch, and D is the second moment of draws from N(0, I), so each step with
    lr = 1 leaves ``I − D⁻¹`` of the error, about √(d/rows): Newton's method up to sampling noise.
    """
    rows, n, d = 4000, 8, 3
    x = torch.randn(rows, n, dtype=torch.float64) * torch.logspace(-2, 2, n, dtype=torch.float64)
    optimum = torch.randn(d, n + 1, dtype=torch.float64)
    y = x @ optimum[:, :-1].mT + optimum[:, -1]
    model = nn.Sequential(nn.Linear(n, d)).double()
    opt = KFAC(model, lr=1.0, momentum=0.0, damping=1e-22, output_transfer="linear")
    errors = [(joints(model)[0] - optimum).norm()]
    for _ in range(6):
        (0.5 * (model(x) - y).square().sum() / rows).backward()
        opt.step()
        opt.zero_grad()
        errors.append((joints(model)[0] - optimum).norm())
    assert all(after < 0.1 * before for before, after in pairwise(errors))
    assert errors[-1] < 1e-7 * errors[0]


def test_a_step_does_not_depend_on_how_the_inputs_are_scaled() -> None:
    """The natural gradient is invariant under an affine map of a layer's inputs."""
    transform = torch.diag(torch.tensor([1e-2, 1.0, 30.0, 5.0, 0.3, 2.0]).double())
    x = batch(40, 6)
    outputs = []
    for scaled in (False, True):
        model = network(sizes=(6, 3))
        if scaled:
            with torch.no_grad():
                model[0].weight.copy_(model[0].weight @ torch.linalg.inv(transform))
        inputs = x @ transform if scaled else x
        opt = KFAC(model, lr=0.5, damping=1e-22, output_transfer="sigmoid")
        for _ in range(3):
            cross_entropy(model(inputs), x[:, :3]).backward()
            opt.step()
            opt.zero_grad()
        outputs.append(model(inputs).detach())
    assert_close([outputs[0]], [outputs[1]], 1e-4)


@pytest.mark.parametrize("options", [{}, {"every": 5}, {"clip": 1e-2, "lr": 1.0}], ids=str)
def test_an_autoencoder_learns_faster_than_with_sgd(options: dict[str, Any]) -> None:
    given = {"lr": 0.05, "output_transfer": "sigmoid", **options}
    check_learns(lambda model: KFAC(model, **given))


# ---- torch.optim's contract ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"every": 3, "clip": 1e-3, "weight_decay": 0.1}], ids=str)
def test_resumed_run_is_bit_identical(options: dict[str, Any]) -> None:
    check_resumes(
        lambda model: KFAC(model, lr=0.1, output_transfer="sigmoid", **options),
        lambda model: KFAC(model, lr=3.0, output_transfer="sigmoid"),
        before=22,  # beyond the first steps, which always compute the inverses
        after=6,
    )


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_model_and_optimizer_trains_on_by_itself(copier: Any) -> None:
    model, opt = make()
    train(model, opt, range(2))
    twin, twin_opt = copier((model, opt))
    before = weights(model)
    train(twin, twin_opt, range(2, 4))
    assert_close(before, weights(model), 0.0)
    train(model, opt, range(2, 4))
    assert_close(weights(model), weights(twin), 0.0)


def test_schedulers_move_lr_and_momentum() -> None:
    model, opt = make(lr=0.1)
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10)
    seen = []
    for step in range(4):
        before = weights(model)
        train(model, opt, range(step, step + 1))
        scheduler.step()
        moved = max((a - b).abs().max() for a, b in zip(before, weights(model), strict=True))
        seen.append((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"], moved))
    assert len({lr for lr, _, _ in seen}) == len({momentum for _, momentum, _ in seen}) == 4
    opt.param_groups[0]["lr"] = 0.0
    before = weights(model)
    train(model, opt, range(4, 5))
    assert_close(weights(model), before, 0.0)


def test_step_before_backward_raises() -> None:
    model, opt = make()
    with pytest.raises(RuntimeError, match=r"Call loss.backward\(\) before step\(\)"):
        opt.step()
    backward(model)
    opt.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="No layer recorded a backward pass"):
        opt.step()


def test_closure_is_evaluated_with_gradients() -> None:
    model, opt = make()
    other, plain = make()

    def closure() -> Tensor:
        opt.zero_grad()
        return backward(model, seed=0)

    with torch.no_grad():
        loss = opt.step(closure)
    assert_close([loss], train(other, plain, range(1)))
    assert_close(weights(model), weights(other), 0.0)


def test_sampling_leaves_gradients_and_the_global_random_state_alone() -> None:
    model, opt = make()
    before = torch.get_rng_state()
    plain = network()
    backward(model)
    backward(plain)
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    opt.step()
    assert torch.equal(before, torch.get_rng_state())


def test_labels_differ_from_step_to_step() -> None:
    model, opt = make(lr=0.0)
    drawn = []
    for _ in range(2):
        backward(model)
        drawn.append(row_gradients.sampled(opt._layers[2]))
        opt.step()
        opt.zero_grad()
    assert not torch.equal(*drawn)


def test_parts_of_the_model_called_by_themselves() -> None:
    """If only parts of the model are called, no labels can be drawn from its output."""
    model, opt = make()
    (model[0](batch(7, 6)).square().sum()).backward()
    with pytest.raises(RuntimeError, match=r"No Fisher matrix was sampled for layer '0'"):
        opt.step()
    opt.zero_grad()
    train(model, opt, range(1))
    factor = opt.state[model[0].weight]["inputs"].clone()
    before = weights(model)
    (model[0](batch(7, 6)).square().sum()).backward()
    opt.step()  # the averages so far serve
    assert torch.equal(factor, opt.state[model[0].weight]["inputs"])
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert moved == [True, True, False, False, False, False]


def test_frozen_tensors_stay_and_factors_follow() -> None:
    """With a frozen bias, the layer's Fisher matrix is that of its weight alone."""
    model, opt = make(damping=0.02, momentum=0.0)
    train(model, opt, range(2))
    model[0].bias.requires_grad_(False)
    model[2].requires_grad_(False)
    before = weights(model)
    backward(model)
    x, g = batch(7, 6), row_gradients.sampled(opt._layers[0])
    direction = dense_direction(x.mT @ x / 7, g.mT @ g / 7, model[0].weight.grad, 0.02)
    opt.step()
    after = weights(model)
    assert_close(after[:4], [before[0] - 0.1 * direction, *before[1:4]], 1e-9)
    assert not torch.equal(before[4], after[4])
    assert "frozen" in opt.summary()


# ---- fallback and errors ---------------------------------------------------------------------------


def with_norm(lr: float = 1e-2) -> tuple[nn.Sequential, KFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, KFAC(
        model, loss_fn=nn.BCEWithLogitsLoss(), fallback=lambda p: torch.optim.AdamW(p, lr=lr)
    )


def test_the_fallback_trains_the_rest_exactly_as_it_would_alone() -> None:
    model, opt = with_norm()
    norm = [p.detach().clone().requires_grad_() for p in model[1].parameters()]
    alone = torch.optim.AdamW(norm, lr=1e-2)
    for seed in range(3):
        backward(model, seed)
        for mine, theirs in zip(norm, model[1].parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        alone.step()
        opt.step()
        opt.zero_grad()
    assert_close(weights(model[1]), [p.detach() for p in norm], 0.0)


def test_resume_and_schedules_with_a_fallback() -> None:
    model, opt = with_norm()
    train(model, opt, range(3))
    saved = saved_and_loaded(model, opt)
    resumed, other = with_norm(lr=0.7)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    for net, o in ((model, opt), (resumed, other)):
        scheduler = lr_scheduler.ExponentialLR(o, 0.5)
        train(net, o, range(3, 5))
        scheduler.step()
        train(net, o, range(5, 7))
        assert [group["lr"] for group in o.param_groups] == [5e-3, 5e-3]
    assert_close(weights(model), weights(resumed), 0.0)


def test_a_default_fallback_comes_with_a_warning_and_a_summary() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with pytest.warns(UserWarning, match="get AdamW") as caught:
        opt = KFAC(model, output_transfer="linear")
    assert caught[0].filename == __file__
    text = opt.summary()
    assert "kfac" in text
    assert "AdamW" in text
    assert "12 of 18 parameters by K-FAC" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid lr=-1.0"),
        ({"momentum": 1.0}, "Invalid momentum=1.0"),
        ({"decay": 1.0}, "Invalid decay=1.0"),
        ({"damping": 0.0}, r"Invalid damping=0.0. Must be finite and > 0"),
        ({"clip": 0.0}, "Invalid clip=0.0"),
        ({"weight_decay": -1.0}, "Invalid weight_decay=-1.0"),
        ({"every": 0}, r"Invalid every=0. Must be an integer >= 1"),
        ({"every": True}, "Invalid every=True"),
        ({"output_transfer": None}, r"Invalid output_transfer=None. .* give loss_fn="),
        ({"output_transfer": "tanh"}, "Invalid output_transfer='tanh'"),
    ],
)
def test_invalid_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_what_cannot_be_served() -> None:
    model, opt = make()
    with pytest.raises(TypeError, match="KFAC takes the model itself, not generator"):
        KFAC(model.parameters(), output_transfer="sigmoid")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no linear layer"):
        KFAC(nn.Sequential(nn.LayerNorm(3)), output_transfer="linear")
    with pytest.raises(ValueError, match="KFAC trains the whole model"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_parameters_may_not_be_taken_out_of_the_group() -> None:
    model, opt = make()
    x, start = batch(7, 6), weights(model)
    cross_entropy(model(x), x[:, :3]).backward()
    opt.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match=r"Freeze them with requires_grad_\(False\)"):
        opt.step()
    assert all(map(torch.equal, start, weights(model)))


def test_a_model_that_is_a_layer_has_no_name() -> None:
    text = KFAC(nn.Linear(3, 2), lr=0.1, output_transfer="linear").summary()
    assert "(model)" in text
    named = KFAC(nn.Sequential(nn.Linear(3, 2)), lr=0.1, output_transfer="linear").summary()
    assert "(model)" not in named
    assert named.splitlines()[-1] == text.splitlines()[-1] == (
        "1 modules; 8 of 8 parameters by K-FAC"
    )  # fmt: skip


def test_a_state_from_before_the_first_step_changes_nothing() -> None:
    """The labels of the first step are those of an optimizer that has loaded nothing."""
    ends = []
    for loaded in (False, True):
        model, opt = make()
        if loaded:
            opt.load_state_dict(opt.state_dict())
        train(model, opt, range(2))
        ends.append(weights(model))
    assert_close(*ends, 0.0)


def test_a_step_forgets_its_rows() -> None:
    model, opt = make()
    backward(model)
    opt.step()
    with pytest.raises(RuntimeError, match="No layer recorded a backward pass since the last step"):
        opt.step()
