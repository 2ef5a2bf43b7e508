"""LocoProp, AdamW and Muon on a small GPT that predicts the characters of Shakespeare's plays.

    python examples/shakespeare_gpt.py --text input.txt --search   # settings, by validation loss
    python examples/shakespeare_gpt.py --text input.txt            # at equal steps, and at equal time
    python examples/shakespeare_gpt.py --text input.txt --table    # the table again

The text is any; made for the 1.1 million characters known as tiny Shakespeare, which are looked for
in tinyshakespeare/input.txt of --data-dir or of the folder that TORCH_LOCOPROP_DATA names. The first
90 % are trained on, the next 5 % are for validation, the last 5 % for the test.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import comparison
import torch
import torch.nn.functional as F
from muon import adamw, muon_and_adamw
from torch import Tensor, nn
from torch.optim import Optimizer
from training import Batches, Method, Settings, Task

from torch_locoprop import LocoProp
from torch_locoprop.solvers import Exact
from torch_locoprop.study.data.datasets import VARIABLE

# ---- the model ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to what came before, then two layers for each position by itself."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden_in = nn.Linear(width, 4 * width)
        self.hidden_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = F.gelu(self.hidden_in(self.hidden_norm(x)))
        result: Tensor = x + self.dropout(self.hidden_out(hidden))
        return result

    def attention(self, x: Tensor) -> Tensor:
        parts = self.attention_in(x).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.attention_out(found.transpose(1, 2).flatten(2))
        return result


class GPT(nn.Module):
    """Logits ``[N, context, characters]`` of the character after each."""

    def __init__(
        self, characters: int, layers: int, width: int, heads: int, context: int, dropout: float
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)
        self.apply(_small)
        for name, p in self.named_parameters():
            if name.endswith("_out.weight"):  # so that all blocks together add what one would
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[-1], device=text.device)
        x = self.dropout(self.characters(text) + self.positions(places))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def _small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


# ---- the methods --------------------------------------------------------------------------------

SHRINK = 1e-4  # of the weights in a step at the full rate, the same for all methods
BETAS = (0.9, 0.99)
INNER = ["blocks.*"]  # layers with local problems: all but the head, as for Muon
LAYERS = {"inner": INNER, "hidden": ["blocks.*.hidden_*"], "all": None}


def by_adamw(model: nn.Module, settings: Settings) -> Optimizer:
    return adamw(model.parameters(), settings["lr"], SHRINK, BETAS)


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """Those of the blocks."""
    return [p for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2]


def by_muon(model: nn.Module, settings: Settings) -> Optimizer:
    """Muon for the matrices of the blocks; AdamW for embeddings, head, biases and norms."""
    return muon_and_adamw(model.parameters(), matrices_of(model), settings, SHRINK, BETAS)


def by_exact_muon(model: nn.Module, settings: Settings) -> Optimizer:
    """LocoProp-S in closed form, ``G (XᵀX + λI)⁻¹``, as the gradient that Muon steps along."""
    return LocoProp(
        model,
        lr=settings["lr"],
        variant="locoprop-s",
        gamma=1.0,
        # One batch has rows enough: in all other steps nothing is kept of them.
        solver=Exact(every=20, damping=settings["damping"]),
        local_reduction="mean",
        layers=LAYERS[settings["layers"]],
        apply="gradient",
        outer=by_muon(model, settings),
    )


def by_local_steps_adamw(model: nn.Module, settings: Settings) -> Optimizer:
    """LocoProp-S by five plain iterations, as the gradient that AdamW steps along.

    They converge for ``lr < 2 / λ``, with λ the largest eigenvalue of XᵀX / rows, which is below its
    trace: the inputs of a row times their mean square.
    """
    blocks = model.get_submodule("blocks")
    linear = [m for m in blocks.modules() if isinstance(m, nn.Linear)]
    groups = [{"params": m.parameters(), "lr": settings["reach"] / m.in_features} for m in linear]
    inside = {id(p) for m in linear for p in m.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside]
    lr = settings["lr"]
    return LocoProp(
        model,
        param_groups=[*groups, {"params": rest}],
        variant="locoprop-s",
        gamma=1.0,
        solver="sgd",
        local_steps=5,
        local_decay="constant",
        local_reduction="mean",
        layers=INNER,
        apply="gradient",
        outer=lambda params: adamw(params, lr, SHRINK, BETAS),
        fallback=lambda rest: adamw(rest, lr, SHRINK, BETAS),
    )


def by_locoprop(model: nn.Module, settings: Settings) -> Optimizer:
    """LocoProp-S as in the paper, with RMSProp; its solution replaces the weights."""
    lr = settings["lr"]
    return LocoProp(
        model,
        lr=lr,
        variant="locoprop-s",
        gamma=settings["gamma"],
        local_steps=5,
        solver="rmsprop",
        momentum=0.9,
        decay=0.9,
        eps=1e-8,
        weight_decay=SHRINK / lr,
        local_reduction="mean",
        layers=INNER,
        fallback=lambda rest: adamw(rest, settings["fallback_lr"], SHRINK, BETAS),
    )


METHODS = {
    "adamw": Method(
        by_adamw,
        {"lr": 2e-3},
        [
            {"lr": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]},
            {"lr": [2.8e-3, 3.4e-3, 4.8e-3, 5.6e-3]},
        ],
    ),
    "muon": Method(
        by_muon,
        {"lr": 1.6e-2, "momentum": 0.95},
        [
            {"lr": [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]},
            {"lr": [8e-3, 1.6e-2], "momentum": [0.9, 0.98]},
        ],
    ),
    "locoprop-s-exact-muon": Method(
        by_exact_muon,
        {"lr": 8e-3, "momentum": 0.95, "damping": 1.0, "layers": "inner"},
        [
            {"lr": [8e-3, 1.6e-2], "momentum": [0.9], "damping": [1.0, 4.0]},
            {"lr": [4e-3, 8e-3], "damping": [1.0, 4.0]},
            {"lr": [8e-3], "layers": ["hidden", "all"]},
        ],
    ),
    "locoprop-s-adamw": Method(
        by_local_steps_adamw,
        {"lr": 2e-3, "reach": 1.0},
        [
            {"lr": [1e-3, 2e-3, 4e-3], "reach": [1.0, 3.0]},
            {"lr": [4e-3], "reach": [10.0]},
            {"lr": [8e-3], "reach": [1.0, 3.0, 10.0]},
        ],
    ),
    "locoprop-s": Method(
        by_locoprop,
        {"lr": 3e-4, "gamma": 10.0, "fallback_lr": 2e-3},
        [
            {"lr": [1e-4, 3e-4, 1e-3], "gamma": [10.0, 100.0]},
            {"lr": [3e-5], "gamma": [100.0]},
            {"lr": [3e-5, 1e-4], "gamma": [1000.0]},
            {"lr": [1e-4], "gamma": [100.0], "fallback_lr": [4e-3]},
        ],
    ),
}


# ---- the data -----------------------------------------------------------------------------------


class Text(NamedTuple):
    """The text for training ``[length]``, and windows ``[N, context]`` of the rest."""

    characters: int  # distinct ones
    train: Tensor
    held_out: dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ShakespeareGPT(Task):
    """The next character of a text, whose distinct characters are numbered."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    context: int = 128
    dropout: float = 0.2
    batch_size: int = 64

    name = "shakespeare-gpt"
    methods = METHODS
    shown = ("test loss",)

    def load(self, device: torch.device) -> Text:
        if self.source is None:
            raise SystemExit(
                f"No text. Name a file with --text, or with --data-dir or {VARIABLE} a folder that "
                "has tinyshakespeare/input.txt."
            )
        try:
            text = self.source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(
                f"{self.source} is no text ({error}). Name one with --text."
            ) from error
        number = {character: i for i, character in enumerate(sorted(set(text)))}
        numbers = torch.tensor([number[character] for character in text], device=device)
        ends = [int(part * len(numbers)) for part in (0.9, 0.05)]
        train, validation, test = numbers.split([*ends, len(numbers) - sum(ends)])
        if len(validation) <= self.context:
            raise SystemExit(
                f"{self.source} is too short: a twentieth of its {len(text)} characters has no "
                f"window of {self.context} and what follows. Name a longer one with --text."
            )
        parts = {"validation": self.windows(validation), "test": self.windows(test)}
        return Text(len(number), train, parts)

    def windows(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """All of a text, window by window, and the characters that follow."""
        count = (len(text) - 1) // self.context
        length = count * self.context
        shape = (count, self.context)
        return text[:length].reshape(shape), text[1 : length + 1].reshape(shape)

    def model(self, data: Text) -> nn.Module:
        sizes = (self.layers, self.width, self.heads, self.context)
        return GPT(data.characters, *sizes, self.dropout)

    def batches(self, data: Text, generator: torch.Generator) -> Batches:
        """Windows at random places."""
        device = data.train.device
        window = torch.arange(self.context, device=device)
        last = len(data.train) - self.context
        while True:
            starts = torch.randint(last, (self.batch_size, 1), generator=generator, device=device)
            yield data.train[starts + window], data.train[starts + window + 1]

    def held_out(self, data: Text) -> dict[str, tuple[Tensor, Tensor]]:
        return data.held_out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = comparison.parser(__doc__, steps=2000)
    parser.add_argument("--text", type=Path, help="the text itself")
    parser.add_argument("--data-dir", type=Path, help="a folder with tinyshakespeare/input.txt")
    options = parser.parse_args(arguments)
    text = options.text or found(options.data_dir)
    comparison.main(ShakespeareGPT(text, options.bf16), options)


def found(data_dir: Path | None) -> Path | None:
    """The text in one of the folders that may have it."""
    folders = [folder for folder in (data_dir, os.environ.get(VARIABLE)) if folder]
    paths = (Path(folder) / "tinyshakespeare" / "input.txt" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


if __name__ == "__main__":
    main()
