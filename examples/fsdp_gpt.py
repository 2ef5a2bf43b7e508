"""Train a small GPT that `fully_shard` divides among processes, with LocoProp's default settings.

    torchrun --nproc-per-node 2 examples/fsdp_gpt.py
    torchrun --nproc-per-node 2 examples/fsdp_gpt.py --text input.txt --steps 500 --folder checkpoints
    torchrun --nproc-per-node 4 examples/fsdp_gpt.py --text input.txt --steps 500 --folder checkpoints

Each process has some rows of every weight and its own part of each batch. With --folder, the last step
is saved there, and a run with any number of processes goes on from the last complete checkpoint. Runs
on GPUs where there are any, otherwise on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from arguments import count
from shakespeare_gpt import GPT
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_locoprop import LocoProp
from torch_locoprop.distributed.checkpoint import check_complete

CONTEXT, BATCH = 32, 32  # characters of a window, and windows of all processes together


def batches(text: Tensor, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this process's windows of each batch, and the character after each position."""
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    step = first_step
    while True:
        numbers = torch.Generator().manual_seed(step)  # the same batch in all processes
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=numbers)
        windows = (starts + torch.arange(CONTEXT))[rank::processes].to(text.device)
        yield text[windows], text[windows + 1]
        step += 1


def last_checkpoint(folder: Path) -> Path | None:
    """Return the folder of the last step that was saved completely; its metadata are written last."""
    found = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def save(folder: Path, model: nn.Module, opt: LocoProp) -> None:
    """Save model and optimizer, each process its own part."""
    weights, state = get_state_dict(model, opt)
    writer = dcp.FileSystemWriter(
        folder, overwrite=False
    )  # files of two steps would not fit together
    dcp.save({"model": weights, "opt": state}, storage_writer=writer)


def load(folder: Path, model: nn.Module, opt: LocoProp) -> None:
    """Load what any number of processes has saved."""
    check_complete(folder)
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)


def train(options: argparse.Namespace, device: torch.device) -> float:
    """Train and return the mean loss of the last step over all processes."""
    written = options.text.read_text(encoding="utf-8")
    number = {character: i for i, character in enumerate(sorted(set(written)))}
    text = torch.tensor([number[character] for character in written], device=device)
    torch.manual_seed(0)  # the same weights in all processes, before they are divided
    model = GPT(len(number), layers=2, width=64, heads=4, context=CONTEXT, dropout=0.0).to(device)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Its output is a view, which no operation here changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    criterion = nn.CrossEntropyLoss()
    opt = LocoProp(model, loss_fn=criterion, fallback=lambda p: torch.optim.AdamW(p, lr=1e-2))
    saved = None if options.folder is None else last_checkpoint(options.folder)
    if saved is not None:
        load(saved, model, opt)
    done = opt.param_groups[0]["steps"]
    mean = torch.zeros((), device=device)
    for step, (x, y) in zip(range(done, options.steps), batches(text, done), strict=False):
        loss = criterion(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / distributed.get_world_size()
        distributed.all_reduce(mean)
        if distributed.get_rank() == 0 and (step % 20 == 0 or step + 1 == options.steps):
            print(f"step {step:4d}  loss {float(mean):.4f}", flush=True)
    if options.folder is not None and done < options.steps:
        save(options.folder / f"step-{options.steps}", model, opt)
    if distributed.get_rank() == 0 and options.summary:
        print(opt.summary())
    return float(mean)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = Path(__file__).with_name("README.md")
    parser.add_argument("--text", type=Path, default=text, help="text file; default: README.md")
    parser.add_argument("--steps", type=count, default=100)
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint")
    parser.add_argument("--summary", action="store_true", help="print how each layer is trained")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        raise SystemExit(
            "Start this example with torchrun --nproc-per-node 2 examples/fsdp_gpt.py."
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(options, device)
    finally:
        gc.collect()  # the model is in circles of references, and must not outlive the group
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
