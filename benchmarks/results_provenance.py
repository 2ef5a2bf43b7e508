"""Write where the runs of `results` come from: machine, versions, precision and revision of the code.

    python benchmarks/results_provenance.py

A run's `config.json` has its settings, data, environment and revision; that of older runs has no
revision. The table has the commit that added the run, and its code is not newer than that.
"""

import json
import subprocess
from collections import defaultdict
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
HEAD = ("folder", "runs", "machine", "precision", "torch", "torch-locoprop", "added by")
OPENING = """# Provenance of the runs

This repeats a run: `locoprop train --config results/FOLDER/RUN/config.json`. The runs so far have not
recorded the revision of their code, as new ones do. The last column has the commit that added them;
their code is not newer. `2 together` after a machine: the runs were trained as populations of two
(`python -m benchmarks.more_seeds`), so their seconds and memory are not those of a run alone. Written
by `python benchmarks/results_provenance.py`.
"""


def run_folders(top: Path = RESULTS) -> list[Path]:
    """Return the folders of all runs, in the order of their names."""
    return sorted(path.parent for path in top.rglob("config.json"))


def revisions(top: Path = RESULTS) -> dict[str, str]:
    """Return the commit that added each file below a folder, by its path from there."""
    command = ["git", "log", "--diff-filter=AR", "--name-only", "--format=commit %h", "--relative"]
    log = subprocess.run([*command, "."], cwd=top, check=True, capture_output=True, text=True)
    found: dict[str, str] = {}
    commit = ""
    for line in log.stdout.splitlines():
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif line:
            found.setdefault(line, commit)
    return found


def table(top: Path = RESULTS) -> str:
    """Return the table as Markdown: runs that differ in nothing but their name share a row."""
    added = revisions(top)
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for folder in run_folders(top):
        path = folder.relative_to(top)
        content = json.loads((folder / "config.json").read_text())
        environment = content["environment"]
        together = f", {environment['population']} together" if "population" in environment else ""
        key = (
            str(path.parent),
            environment["machine"] + together,
            content["config"]["precision"],
            environment["torch"].partition("+")[0],
            environment["torch_locoprop"],
            added.get(str(path / "config.json"), "not committed"),
        )
        rows[key].append(path.name)
    lines = [HEAD, ["---"] * len(HEAD)]
    for (folder, *others), runs in sorted(rows.items()):
        lines.append((f"`{folder}`", ", ".join(f"`{run}`" for run in runs), *others))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    (RESULTS / "PROVENANCE.md").write_text(f"{OPENING}\n{table()}\n")
