"""Fingerprints of two processes that train one model under `DistributedDataParallel`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.fingerprints.cases import DISTRIBUTED
from benchmarks.fingerprints.digests import Prints, digest
from benchmarks.fingerprints.models import MODELS
from benchmarks.fingerprints.training import Run, quiet

PROCESSES = 2


def fingerprints(wanted: Callable[[str], bool]) -> Prints:
    """Return the digests of all distributed runs whose name is wanted.

    The processes meet in a file of a temporary folder, over the loopback interface.
    """
    names = [name for name in DISTRIBUTED if wanted(f"distributed/{name}")]
    if not names:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, (folder, names), nprocs=PROCESSES)
        texts = [Path(folder, f"{rank}.json").read_text() for rank in range(PROCESSES)]
    ranks = [json.loads(text) for text in texts]
    return {
        f"distributed/{name}": {
            part: digest([own[name][part] for own in ranks]) for part in ranks[0][name]
        }
        for name in names
    }


def _process(rank: int, folder: str, names: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=100),
    )
    found = {}
    for name in names:
        case = DISTRIBUTED[name]
        half = MODELS[case.model].rows // 2
        with quiet():
            run = Run(case, DistributedDataParallel, slice(rank * half, (rank + 1) * half))
            run.train()
        found[name] = run.digests()
    torch.distributed.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
