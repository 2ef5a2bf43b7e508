"""The command `locoprop`: starts the commands of the study and tells errors in one sentence."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import NoReturn

FAILED = 1

_FULL = "Make room, then go on with --resume."
_CLOSED = "Choose a folder that you can write to with --out."
ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST), _CLOSED),
}
"""What to do about an error of the file system."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        from torch import OutOfMemoryError

        from torch_locoprop.study.commands import app
        from torch_locoprop.study.datasets import DatasetError
        from torch_locoprop.study.run_folder import RunError
    except ImportError as error:
        _fail(
            f"The command line needs the package {error.name}, which is not installed. "
            'Install it with: pip install "torch-locoprop[study]".'
        )
    try:
        app(args=arguments, prog_name="locoprop")
    except (ValueError, ImportError, DatasetError, RunError) as error:
        _fail(str(error))
    except OutOfMemoryError as error:
        _fail(
            f"{str(error).splitlines()[0]} Use a smaller --batch-size or --model, or fewer at a time."
        )
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}. {ADVICE.get(error.errno or 0, '')}".rstrip())


def _fail(message: str) -> NoReturn:
    """Print the message, red on a terminal, and exit."""
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}{message}{plain}", file=sys.stderr)
    sys.exit(FAILED)


if __name__ == "__main__":
    main()
