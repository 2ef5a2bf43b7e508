"""The entry point of the command `locoprop`, apart from the package so that it runs before torch.

Importing any part of ``torch_locoprop`` imports torch, and with it GNU's OpenMP library, which reads
its settings only then. The command itself is ``torch_locoprop.study.cli``.
"""

import os

SPINCOUNT = "1000"
"""The number of times that a thread checks for the others before it sleeps.

By default the threads of a matrix product wait for each other busily. Where another program uses one of
the cores, that makes every product up to ten times slower; where none does, a short wait costs nothing.
"""


def main() -> None:
    """Run the command `locoprop` with the arguments of the process."""
    if "OMP_WAIT_POLICY" not in os.environ:  # a choice of the user, which the count would override
        os.environ.setdefault("GOMP_SPINCOUNT", SPINCOUNT)
    from torch_locoprop.study.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
