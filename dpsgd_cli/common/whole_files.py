"""Files that are written completely or not at all.

An unfinished file or folder has a hidden name that shows later whether the process that wrote it was killed.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def host() -> str:
    """Return the name of this machine, as hidden names have it."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


def hidden_name(path: Path) -> Path:
    """Return a name beside `path` that no other writer has. It names the process and its machine."""
    return path.with_name(f".{path.name.lstrip('.')}.writing-{host()}_{os.getpid()}_{secrets.token_hex(4)}")


@contextmanager
def writing(path: Path, owner_only: bool = False, replace: bool = True) -> Iterator[BinaryIO]:
    """Yield a stream whose content becomes the file at the end of the block, on request readable by its owner only.

    An error leaves the old file; an OSError names the file. Raises FileExistsError if `replace` is false and the file
    exists: of several processes, only one writes.
    """
    temporary, mode = hidden_name(path), 0o600 if owner_only else 0o666
    try:
        # the process's umask restricts the mode, as for any file
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        (os.replace if replace else os.link)(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
