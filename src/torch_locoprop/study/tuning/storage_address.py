"""The address of a storage: the path of a journal file, or the URL of a database."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

FORMS = (
    "the path of a journal file, sqlite:///FILE, or postgresql://USER@HOST/DATABASE, with "
    "PostgreSQL's password in PGPASSWORD or ~/.pgpass"
)


@dataclass(frozen=True)
class StorageAddress:
    """The place where several processes keep the trials of a search.

    Args:
        url: The URL of a database as given, with its password; empty for a journal file.
        path: The journal file or the file of SQLite; None for PostgreSQL.
        public: The address without a password, for files and messages.
    """

    url: str
    path: Path | None
    public: str

    @classmethod
    def of(cls, text: str) -> StorageAddress:
        """Return the address that a user has given.

        Raises:
            ValueError: If it is not such an address.
        """
        scheme, mark, rest = text.partition("://")
        if not mark:
            return cls._of_journal(text)
        if scheme == "sqlite":
            file = rest.removeprefix("/")
            if file in ("", ":memory:") or file == rest or "?" in file:
                raise ValueError(
                    f"Invalid storage {text!r}. Must be sqlite:///FILE, such as sqlite:///trials.db "
                    "in the current folder, or sqlite:////shared/trials.db."
                )
            path = Path(file).expanduser().absolute()
            return cls(f"sqlite:///{path}", path, f"sqlite:///{path}")
        if scheme == "postgresql":
            return cls._of_postgresql(text)
        raise ValueError(f"Unknown storage {scheme}://... Must be {FORMS}.")

    @classmethod
    def _of_journal(cls, text: str) -> StorageAddress:
        if not text or text.partition(":")[0] in ("sqlite", "postgresql", "postgres"):
            raise ValueError(f"Invalid storage {text!r}. Must be {FORMS}.")
        path = Path(text).expanduser().absolute()
        return cls("", path, str(path))

    @classmethod
    def _of_postgresql(cls, text: str) -> StorageAddress:
        parts = urlsplit(text)
        user = "" if parts.username is None else f"{parts.username}@"
        host = parts.netloc.rpartition("@")[2]
        rest = [(name, value) for name, value in parse_qsl(parts.query) if name != "password"]
        query = f"?{urlencode(rest, safe='/')}" if rest else ""
        public = f"postgresql://{user}{host}{parts.path}{query}"
        try:
            has_place = parts.port != 0 and bool(parts.path.strip("/"))
        except ValueError:  # the port is not a number
            has_place = False
        if not has_place:
            raise ValueError(
                f"Invalid storage {public!r}. Must be postgresql://USER@HOST/DATABASE or "
                "postgresql://USER@HOST:PORT/DATABASE."
            )
        return cls(text, None, public)
