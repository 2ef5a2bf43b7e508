"""The spectral step of LocoProp in one file that imports torch alone, with a small GPT to try it on.

Copy `Spectral` into a training script, for example one of a GPT speed run:

    spectral = Spectral(model.blocks.modules(), lr=0.015)      # all nn.Linear among these modules
    adamw = torch.optim.AdamW(the_other_parameters, lr=0.005)

    loss.backward()                                            # one forward and one backward pass
    spectral.step(); adamw.step()

Its steps are those of `LocoProp(model, preset="spectral")`, and with `agreement=1.0`, `bias_rate=0.0`
and `lr=0.04` those of `LocoProp(model)`; a test compares them. It has no convolutions and no CUDA
graphs.

Two control runs do the same work. `apply="gradient"` solves every local problem, drops the solution,
and takes the step along the average gradient, which is close to Muon's. `apply="nothing"` solves every
local problem and leaves the weights as they are.

    python examples/spectral_single_file.py --text input.txt
    python examples/spectral_single_file.py --text input.txt --apply gradient
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

EARLY = 10  # each of the first steps renews C: a single batch is a poor estimate
WINDOW = 0.97  # weight of the past in the share of the signal
LEAST = 0.15  # the smallest agreement
RATE, LEFT, MOST = 0.1, 0.2, 16.0  # of the growth of steps
APPLY = ("solution", "gradient", "nothing")


class Spectral(torch.optim.Optimizer):
    """Closed form of LocoProp-S on a running C = [X 1]ᵀ[X 1], with a bounded spectral norm.

    With the gradient G of [W b] and its Nesterov average M, a step is
    ``−lr · 0.2 · sqrt(max(d, n)) · rows(polar(M (C/c + λI)⁻¹))``, where c is the mean diagonal of C and
    ``rows`` makes the rows about equally long. Forward hooks record C in the steps that renew it.
    Layers of one shape are computed as one stack. With several processes, gradients must have been
    averaged before the step; C is summed here.

    Args:
        modules: modules of which all ``nn.Linear`` are trained, in float32 or float64.
        lr: the step moves an entry of a weight by about 0.2 lr.
        momentum: decay of the average gradient.
        decay: decay of the mean squares of the rows.
        weight_decay: weights, not biases, are multiplied by ``1 − lr · weight_decay`` before the step.
        every: steps between two renewals of C and its inverse, after the first ten steps.
        averaging: weight of the past in the running average of C.
        damping: λ in a long run. It begins at 1 and falls as ``1 / (1 + t / fall)`` in step t.
        fall: see ``damping``.
        agreement: the step is multiplied by this power of the agreement of the last gradients and of
            the growth of steps.
        bias_rate: biases move, in addition, by so many learning rates times their average gradient
            divided by the root of its mean square.
        apply: ``solution``, or for control runs ``gradient`` or ``nothing``.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        lr: float = 0.015,
        *,
        momentum: float = 0.9,
        decay: float = 0.95,
        weight_decay: float = 0.0,
        every: int = 10,
        averaging: float = 0.8,
        damping: float = 0.02,
        fall: float = 50.0,
        agreement: float = 0.0,
        bias_rate: float = 1.0,
        apply: str = "solution",
    ) -> None:
        if apply not in APPLY:
            raise ValueError(f"Invalid apply={apply!r}. Must be one of {', '.join(APPLY)}.")
        linear = (module for module in modules if isinstance(module, nn.Linear))
        layers = [layer for layer in dict.fromkeys(linear) if layer.weight.requires_grad]
        for layer in layers:
            if layer.weight.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"A weight is {layer.weight.dtype}. Keep weights in float32 and use autocast."
                )
        settings = {"lr": lr, "momentum": momentum, "decay": decay, "weight_decay": weight_decay}
        trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
        super().__init__(trained, settings)
        self.every, self.averaging, self.damping = every, averaging, damping
        self.fall, self.agreement, self.bias_rate, self.apply = fall, agreement, bias_rate, apply
        self.steps, self.records = 0, True
        stacks: dict[Any, list[nn.Linear]] = {}
        for layer in layers:
            weight = layer.weight
            key = (weight.shape, _bias(layer) is None, weight.dtype, weight.device)
            stacks.setdefault(key, []).append(layer)
        self.stacks = list(stacks.values())
        self.squares = [_squares(stack) for stack in self.stacks]
        for stack, squares in zip(self.stacks, self.squares, strict=True):
            for layer, square in zip(stack, squares, strict=True):
                layer.register_forward_pre_hook(self._recorder(square))

    def _recorder(self, square: Tensor) -> Any:
        """Return a hook that adds [X 1]ᵀ[X 1] of a layer's inputs to ``square`` where C is renewed.

        Passes without gradients, such as evaluations, do not count. Micro-batches add up, and the rows
        of a checkpointed layer count twice: neither matters, because C is divided by its diagonal.
        """

        def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if not (self.records and layer.training and torch.is_grad_enabled()):
                return
            with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
                rows = inputs[0].detach().flatten(0, -2).to(square)
                if square.shape[-1] > rows.shape[-1]:
                    rows = F.pad(rows, (0, 1), value=1.0)
                square.add_(rows.mT @ rows)

        return record

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step and return what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for stack, squares in zip(self.stacks, self.squares, strict=True):
            if any(layer.weight.grad is None for layer in stack):
                raise RuntimeError("A layer has no gradient: call backward() before step().")
            self._step_stack(stack, squares)
        self.steps += 1
        self.records = self.steps < EARLY or self.steps % self.every == 0
        return loss

    def _step_stack(self, stack: list[nn.Linear], squares: Tensor) -> None:
        """Move the layers of one shape; matrices are [layers, d, n], the bias being the last column."""
        group, state = self.param_groups[0], self.state[stack[0].weight]
        mu, rho = group["momentum"], group["decay"]
        gradient = torch.stack([_joined(layer) for layer in stack])
        agreed = self._agreed(state, gradient, mu) if self.agreement > 0 else 1.0
        average = _average(state, "average", gradient, mu)
        if self.records:
            self._renew(state, squares)
        ahead = torch.lerp(gradient, average, mu)
        solution = _product(ahead, state["inverse"])
        # A polar factor has no size: without a gradient, the average of earlier ones would go on.
        present = (gradient != 0).any(-1, keepdim=True).any(-2, keepdim=True)
        direction = polar(ahead if self.apply == "gradient" else solution) * present
        rows = _average(state, "rows", direction.square().mean(-1, keepdim=True), rho)
        equal = direction / _positive(rows.sqrt())
        direction = equal * (_norm(direction) / _positive(_norm(equal)))
        scale = 0.2 * max(gradient.shape[-2:]) ** 0.5 * agreed
        moves = direction * (-group["lr"] * scale)
        if self.bias_rate > 0 and _bias(stack[0]) is not None:
            # A size that forgot sooner than the average would make long steps as gradients vanish.
            rho, of_rows = max(mu, rho), gradient.square().mean(-1, keepdim=True).sqrt()
            own = (1 - rho) ** 0.5 * torch.hypot(gradient[..., -1:], 1e-5 * of_rows)
            past = state.get("bias_size", average[..., -1:].abs() if self.steps else own * 0)
            state["bias_size"] = size = torch.hypot(rho**0.5 * past, own)
            own = average[..., -1:] / _positive(size) * present
            moves[..., -1:] -= group["lr"] * self.bias_rate * agreed * own
        if self.agreement > 0:
            state["moved"] = moves
        if self.apply == "nothing":
            return
        for layer, move in zip(stack, moves, strict=True):
            columns = layer.in_features
            layer.weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(move[:, :columns])
            if (bias := _bias(layer)) is not None:
                bias.add_(move[:, columns])

    def _agreed(self, state: dict[str, Tensor], gradient: Tensor, mu: float) -> Tensor:
        """Return the factor of the step: large if gradients are alike, small if they are noise.

        The average of earlier gradients has no noise in common with this one. So their inner product,
        relative to the square of this one, is the share of what is not noise, in the mean over steps.
        """
        square = common = gradient.square().sum((-2, -1), keepdim=True)
        if self.steps > 0:
            common = (gradient * state["average"]).sum((-2, -1), keepdim=True)
            common = common / (1 - mu**self.steps)
        common = _average(state, "common", common, WINDOW)
        share = common / _positive(_average(state, "energy", square, WINDOW))
        known = 1 - WINDOW ** (self.steps + 1)
        share = 1 - known * (1 - share)  # begins at 1
        growth = self._grown(state, gradient, mu, known)
        return (share.clamp(LEAST**2, 1.0).sqrt() * growth) ** self.agreement

    def _grown(
        self, state: dict[str, Tensor], gradient: Tensor, mu: float, known: float
    ) -> float | Tensor:
        """Return the growth of steps, which rises while they leave much of the gradient along them."""
        if self.steps == 0:
            return 1.0
        left, before = (
            (g * state["moved"]).sum((-2, -1), keepdim=True) for g in (gradient, state["average"])
        )
        left = (-left * (1 - mu**self.steps) / _positive(before.abs())).clamp(-1, 1) - LEFT
        rise = torch.where(left > 0, known * left, left)
        past = state.get("growth", torch.ones_like(rise))
        state["growth"] = (past * (RATE * rise).exp()).clamp(1.0, MOST)
        return state["growth"]

    def _renew(self, state: dict[str, Tensor], squares: Tensor) -> None:
        """Average C with what the hooks have recorded, invert it, and clear the record."""
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(squares)
        mean = squares.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        new = squares / _positive(mean)
        state["gram"] = torch.lerp(new, state["gram"], self.averaging) if "gram" in state else new
        squares.zero_()
        eye = torch.eye(new.shape[-1], dtype=new.dtype, device=new.device)
        damping = max(self.damping, 1 / (1 + self.steps / self.fall))
        factor, failed = torch.linalg.cholesky_ex(state["gram"] + damping * eye)
        before = state.get("inverse", eye)
        inverse = torch.cholesky_inverse(factor)
        state["inverse"] = torch.where((failed != 0)[:, None, None], before, inverse)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the number of steps."""
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state."""
        state_dict = dict(state_dict)
        self.steps = state_dict.pop("steps")
        self.records = self.steps < EARLY or self.steps % self.every == 0
        super().load_state_dict(state_dict)


def polar(matrix: Tensor) -> Tensor:
    """Return approximate polar factors of matrices [..., d, n] by five Newton–Schulz iterations."""
    wide = matrix.shape[-2] <= matrix.shape[-1]
    found = matrix / _positive(matrix.abs().amax((-2, -1), keepdim=True))
    found = found / _positive(_norm(found))
    found = found.bfloat16() if found.is_cuda else found
    found = found if wide else found.mT
    for _ in range(5):
        square = found @ found.mT
        found = 3.4445 * found + (-4.7750 * square + 2.0315 * square @ square) @ found
    return (found if wide else found.mT).to(matrix.dtype)


def _squares(stack: list[nn.Linear]) -> Tensor:
    columns = stack[0].in_features + (_bias(stack[0]) is not None)
    return stack[0].weight.new_zeros(len(stack), columns, columns)


def _bias(layer: nn.Linear) -> Tensor | None:
    return None if layer.bias is None or not layer.bias.requires_grad else layer.bias


def _joined(layer: nn.Linear) -> Tensor:
    """Return the gradient of [W b], or of W if there is no bias to train."""
    bias, gradient = _bias(layer), layer.weight.grad
    assert gradient is not None
    if bias is None:
        return gradient
    assert bias.grad is not None
    return torch.cat([gradient, bias.grad[:, None]], dim=1)


def _average(state: dict[str, Tensor], name: str, new: Tensor, decay: float) -> Tensor:
    """Update the average of this name, which begins at zero."""
    past = state.get(name)
    state[name] = (1 - decay) * new if past is None else torch.lerp(new, past, decay)
    return state[name]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply without TF32: the inverse's small eigenvalues need all digits of float32."""
    if not left.is_cuda:
        return left @ right
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        return left @ right
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)  # type: ignore[no-any-return]


def _positive(tensor: Tensor) -> Tensor:
    return tensor.clamp_min(torch.finfo(tensor.dtype).tiny)


# ---- a small GPT to try it on ---------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention, then two linear layers for each position; no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.hidden_in = nn.Linear(width, 4 * width, bias=False)
        self.hidden_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, context, width] for the same."""
        parts = self.attention_in(F.rms_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(found.transpose(1, 2).flatten(2))
        hidden: Tensor = F.relu(self.hidden_in(F.rms_norm(x, x.shape[-1:]))).square()
        return x + self.hidden_out(hidden)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predicts the next byte: [N, context] -> logits [N, context, 256]."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            nn.init.zeros_(p) if name.endswith("_out.weight") else nn.init.normal_(p, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the byte behind each position."""
        places = torch.arange(text.shape[-1], device=text.device)
        x = self.blocks(self.tokens(text) + self.places(places))
        return self.head(F.rms_norm(x, x.shape[-1:]))  # type: ignore[no-any-return]


def main() -> None:
    """Train the GPT on a text and print the loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="any text")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.015)
    parser.add_argument("--apply", choices=APPLY, default="solution", help="others are controls")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    model = GPT(options.layers, options.width, 4, options.context).to(options.device)
    spectral = Spectral(model.blocks.modules(), options.lr, apply=options.apply)
    own = {p for group in spectral.param_groups for p in group["params"]}
    adamw = torch.optim.AdamW([p for p in model.parameters() if p not in own], lr=options.lr / 3)
    begin, total = time.perf_counter(), 0.0
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(text) - options.context, (options.batch_size, 1))
        chunk = text[starts + torch.arange(options.context + 1)].to(options.device)
        for optimizer in (spectral, adamw):
            rate = options.lr if optimizer is spectral else options.lr / 3
            left = min(1.0, 2 * (options.steps + 1 - step) / options.steps)
            optimizer.param_groups[0]["lr"] = rate * left
        loss = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
        loss.backward()
        for optimizer in (spectral, adamw):
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        if step % max(options.steps // 10, 1) == 0:
            seconds = time.perf_counter() - begin
            mean = total / max(options.steps // 10, 1)
            print(f"step {step:5}  train loss {mean:.4f}  {seconds:.1f} s")
            total = 0.0


if __name__ == "__main__":
    main()
