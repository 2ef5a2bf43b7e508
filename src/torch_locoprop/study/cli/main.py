"""The entry point of `locoprop`: runs a subcommand and prints errors in one sentence."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""Errors of a full disk, and of a folder that cannot be written to."""

LESS = "Use a smaller --batch-size or --model, or fewer at a time."
"""The advice if memory runs out."""

WRITTEN = ("--out", "--runs", "--tensorboard")
"""The options that name a folder to write to."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with one of the codes in `exit_codes`.

    Args:
        arguments: The arguments after `locoprop`; those of the process by default.
    """
    try:
        from torch import OutOfMemoryError

        from torch_locoprop.study.cli import exit_codes
        from torch_locoprop.study.cli.app import app
        from torch_locoprop.study.data.datasets import DatasetError
        from torch_locoprop.study.training.description import RunError
        from torch_locoprop.study.training.stop_signals import terminations_raised
    except ImportError as error:
        _fail(_needed(error))
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        with warnings.catch_warnings(), terminations_raised() as termination:
            warnings.showwarning = _warn
            app(args=arguments, prog_name="locoprop")
    except SystemExit as end:
        # Typer takes any KeyboardInterrupt, and so SIGTERM, for Ctrl-C.
        if end.code == exit_codes.INTERRUPTED and termination.is_set:
            sys.exit(exit_codes.TERMINATED)
        raise
    except ModuleNotFoundError as error:
        _fail(_needed(error))
    except ValueError as error:
        _fail(str(error), exit_codes.USAGE)
    except (ImportError, DatasetError, RunError) as error:
        _fail(str(error))
    except OutOfMemoryError as error:
        _fail(f"{str(error).splitlines()[0]} {LESS}", only_first=False)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's message on a CPU
            raise
        _fail(f"There is not enough memory. {LESS}", only_first=False)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        words = sys.argv[1:] if arguments is None else arguments
        _fail(f"{where}{error.strerror or error}. {_advice(error, words)}".rstrip())


def _needed(error: ImportError) -> str:
    package = str(error.name).partition(".")[0]
    return (
        f"The command line needs the package {package}, which is not installed. "
        'Install it with: pip install "torch-locoprop[study]".'
    )


def _advice(error: OSError, arguments: Sequence[str]) -> str:
    """Return what to do about an error of the file system; empty if nothing is known."""
    if error.errno in FULL:
        again = (
            "continue with --resume" if "train" in arguments[:1] else "give the same command again"
        )
        return f"Free some space, then {again}."
    words = [part for word in arguments for part in word.split("=", 1)]
    path = Path(str(error.filename))
    for option, value in pairwise(words):
        if option in WRITTEN and (path.is_relative_to(value) or Path(value).is_relative_to(path)):
            return f"Choose a folder that you can write to with {option}."
    if error.errno in CLOSED and str(path) not in words:  # a default folder in the current one
        return "Change to a folder that you can write to."
    return ""


def _is_first() -> bool:
    """Return True in the first of the processes that torchrun has started, and without torchrun."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK") == "0"


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning without its line of code."""
    if _is_first():
        print(f"Warning: {message}", file=sys.stderr)


def _fail(message: str, code: int = 1, *, only_first: bool = True) -> NoReturn:
    """Print the message, in red on a terminal, and exit with this code.

    Args:
        message: What is wrong and what to do.
        code: The exit code.
        only_first: All processes of a run have the same error, and the first alone prints it.
    """
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    if _is_first() or not only_first:
        print(f"{red}{message}{plain}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
