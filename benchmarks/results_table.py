"""Print a table of the runs under a folder of results, as Markdown.

python benchmarks/results_table.py results/mnist-tanh-standard
"""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

from torch_locoprop.study.runner import RunResult, result_of

EPOCHS = (20, 40, 60, 80, 100)


def rows(runs: list[RunResult]) -> list[list[str]]:
    """One row a method, the best final train loss first; seeds side by side, curves averaged."""
    by_method: dict[str, list[RunResult]] = defaultdict(list)
    for run in runs:
        by_method[run.config.method].append(run)
    table = []
    for method, members in by_method.items():
        members.sort(key=lambda run: run.config.seed)
        final = [run.metrics[-1] for run in members]
        settled = [run for run in members if run.metrics[-1].train_loss < 100] or members
        curve = [mean(run.metrics[epoch].train_loss for run in settled) for epoch in EPOCHS[:-1]]
        table.append(
            [
                method,
                *(f"{loss:.1f}" for loss in curve),
                ", ".join(f"{row.train_loss:.2f}" for row in final),
                ", ".join(f"{row.test_loss:.1f}" for row in final),
            ]
        )
    return sorted(table, key=lambda row: float(row[-2].split(",")[0]))


def main() -> None:
    folder = Path(sys.argv[1])
    runs = [result_of(path.parent) for path in sorted(folder.glob("*/config.json"))]
    head = ["method", *(f"epoch {epoch}" for epoch in EPOCHS[:-1]), "train, 100", "test, 100"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows(runs)]
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))


if __name__ == "__main__":
    main()
