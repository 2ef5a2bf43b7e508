"""Compare LocoProp with AdamW and Muon on a small GPT that predicts the characters of a text.

    python examples/shakespeare_gpt.py --text input.txt --search   # choose settings by validation loss
    python examples/shakespeare_gpt.py --text input.txt            # train at equal steps and equal time
    python examples/shakespeare_gpt.py --text input.txt --table    # print the table of finished runs

The settings suit the 1.1 million characters known as tiny Shakespeare. Without --text, they are read
from tinyshakespeare/input.txt in --data-dir or in the folder that the environment variable
TORCH_LOCOPROP_DATA names. The first 90 % of the text are for training, the next 5 % for validation and
the last 5 % for the test.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import comparison
import torch
import torch.nn.functional as F
from methods import INNER, Optimizers
from next_token import NextToken, Text
from torch import Tensor, nn
from training import Method

from torch_locoprop.study.data.datasets import VARIABLE

# ---- the model ----------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block: causal self-attention, then two linear layers for each position."""

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
    """A GPT; returns the logits `[N, context, characters]` of the next character at each position."""

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
            if name.endswith(
                "_out.weight"
            ):  # so that the sum over all blocks has the variance of one
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

MAKE = Optimizers({"inner": INNER, "hidden": ["blocks.*.hidden_*"], "all": None})
METHODS = {
    "adamw": Method(
        MAKE.by_adamw,
        {"lr": 2e-3},
        [
            {"lr": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]},
            {"lr": [2.8e-3, 3.4e-3, 4.8e-3, 5.6e-3]},
        ],
    ),
    "muon": Method(
        MAKE.by_muon,
        {"lr": 1.6e-2, "momentum": 0.95},
        [
            {"lr": [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]},
            {"lr": [8e-3, 1.6e-2], "momentum": [0.9, 0.98]},
        ],
    ),
    "soap": Method(
        MAKE.by_soap,
        {"lr": 4e-3, "momentum": 0.95},
        [
            {"lr": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]},
            {"lr": [4e-3, 8e-3], "momentum": [0.9, 0.98]},
        ],
    ),
    "spectral": Method(
        MAKE.by_spectral,
        {"lr": 8e-3, "momentum": 0.9, "layers": "inner"},
        [
            {"lr": [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]},
            {"lr": [8e-3, 1.6e-2], "momentum": [0.95]},
            {"lr": [8e-3, 1.6e-2], "layers": ["all"]},
        ],
    ),
    "locoprop-s-exact-muon": Method(
        MAKE.by_exact_muon,
        {"lr": 8e-3, "momentum": 0.95, "damping": 1.0, "layers": "inner"},
        [
            {"lr": [8e-3, 1.6e-2], "momentum": [0.9], "damping": [1.0, 4.0]},
            {"lr": [4e-3, 8e-3], "damping": [1.0, 4.0]},
            {"lr": [8e-3], "layers": ["hidden", "all"]},
        ],
    ),
    "locoprop-s-adamw": Method(
        MAKE.by_local_steps_adamw,
        {"lr": 2e-3, "reach": 1.0},
        [
            {"lr": [1e-3, 2e-3, 4e-3], "reach": [1.0, 3.0]},
            {"lr": [4e-3], "reach": [10.0]},
            {"lr": [8e-3], "reach": [1.0, 3.0, 10.0]},
        ],
    ),
    "locoprop-s": Method(
        MAKE.by_locoprop,
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


@dataclass(frozen=True)
class ShakespeareGPT(NextToken):
    """Predict the next character of a text."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    dropout: float = 0.2

    name = "shakespeare-gpt"
    methods = METHODS
    shown = ("test loss",)

    def load(self, device: torch.device) -> Text:
        if self.source is None:
            raise SystemExit(
                "No text. Give a file with --text, or a folder that contains "
                f"tinyshakespeare/input.txt with --data-dir or the variable {VARIABLE}."
            )
        try:
            text = self.source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(
                f"{self.source} is not a text file ({error}). Give another with --text."
            ) from error
        number = {character: i for i, character in enumerate(sorted(set(text)))}
        numbers = torch.tensor([number[character] for character in text], device=device)
        ends = [int(part * len(numbers)) for part in (0.9, 0.05)]
        train, validation, test = numbers.split([*ends, len(numbers) - sum(ends)])
        if len(validation) <= self.context:
            raise SystemExit(
                f"{self.source} is too short: 5 % of its {len(text)} characters are fewer than the "
                f"{self.context + 1} of one window. Give a longer text with --text."
            )
        parts = {"validation": self.windows(validation), "test": self.windows(test)}
        return Text(len(number), train, parts)

    def model(self, data: Text) -> nn.Module:
        sizes = (self.layers, self.width, self.heads, self.context)
        return GPT(data.tokens, *sizes, self.dropout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = comparison.parser(__doc__, steps=2000)
    parser.add_argument("--text", type=Path, help="text file")
    parser.add_argument(
        "--data-dir", type=Path, help="folder that contains tinyshakespeare/input.txt"
    )
    options = parser.parse_args(arguments)
    text = options.text or found(options.data_dir)
    comparison.main(ShakespeareGPT(text, options.bf16), options)


def found(data_dir: Path | None) -> Path | None:
    """Return the path of tinyshakespeare/input.txt in the first folder that contains it, or None."""
    folders = [folder for folder in (data_dir, os.environ.get(VARIABLE)) if folder]
    paths = (Path(folder) / "tinyshakespeare" / "input.txt" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


if __name__ == "__main__":
    main()
