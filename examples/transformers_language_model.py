"""LocoProp with Hugging Face's Trainer: gradient accumulation, a schedule, checkpoints, resuming.

    pip install torch-locoprop "transformers[torch]"
    python examples/transformers_language_model.py
    python examples/transformers_language_model.py --epochs 20 --resume    # continue the first run

Pass the optimizer to the Trainer as `optimizers=(opt, None)`; the Trainer makes the schedule. The model
is a tiny GPT-2 with new weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from arguments import count, framework_parser
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from torch_locoprop import LocoProp


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of ten numbers modulo 11, from a random start with a random step of 1 to 5."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(0, 11, (count, 1), generator=generator)
        stride = torch.randint(1, 6, (count, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(10)) % 11

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make() -> tuple[GPT2LMHeadModel, LocoProp]:
    """Make the model and its optimizer."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=11, n_positions=10, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    opt = LocoProp(
        model,
        fallback=lambda params: torch.optim.AdamW(params, lr=0.01),  # embeddings and norms
    )
    return model, opt


def main(arguments: Sequence[str] | None = None, **settings: Any) -> Trainer:
    """Train the model; `settings` has more settings of `TrainingArguments`."""
    options = parsed(arguments)
    checkpoint = newest(options.folder) if options.resume else None
    model, opt = make()
    trainer = Trainer(
        model,
        TrainingArguments(
            str(options.folder),
            use_cpu=True,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulate,
            save_strategy="epoch",
            logging_strategy="epoch",
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            report_to="none",
            **settings,
        ),
        train_dataset=Counting(options.sentences),
        optimizers=(opt, None),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    print(opt.summary())
    return trainer


def newest(folder: Path) -> str:
    """Return the checkpoint that was written last.

    A checkpoint with a higher number may belong to an earlier, longer run.
    """
    states = list(folder.glob("checkpoint-*/trainer_state.json"))
    if not states:
        raise SystemExit(f"No checkpoint in {folder}. Run this without --resume first.")
    return str(max(states, key=lambda state: state.stat().st_mtime_ns).parent)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = framework_parser("A tiny GPT-2 that learns to count.", "runs/transformers")
    parser.add_argument("--sentences", type=count, default=400)
    parser.set_defaults(batch_size=40)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
