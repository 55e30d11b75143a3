"""What a command prints, on the terminal and in a log at the same time.

Within the process, because a pipe into `tee` would change exit statuses and who receives signals.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


class Both:
    """A text stream that writes to the terminal's stream and to a log. It is no terminal: progress appears as plain lines."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self.stream = stream
        self.log = log

    def write(self, text: str) -> int:
        """Write to both; a log that cannot be written (a full disk) does not take the terminal's lines away."""
        with contextlib.suppress(OSError):
            self.log.write(text)
            self.log.flush()
        return self.stream.write(text)

    def flush(self) -> None:
        """Flush the terminal's stream; the log always is."""
        self.stream.flush()

    def isatty(self) -> bool:
        """Never: moving bars have no place in a log, nor beside those of other commands of a workflow."""
        return False

    @property
    def encoding(self) -> str:
        """The encoding of the terminal's stream."""
        return self.stream.encoding

    @property
    def errors(self) -> str | None:
        """How the terminal's stream treats what it cannot encode."""
        return self.stream.errors


@contextlib.contextmanager
def also_to(path: Path | None) -> Iterator[None]:
    """Copy what is printed to ``path``, which is begun anew, tracebacks included; None copies nothing.

    Raises OSError when the file cannot be opened.
    """
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("w", encoding="utf-8")
    try:
        with contextlib.redirect_stdout(Both(sys.stdout, log)), contextlib.redirect_stderr(Both(sys.stderr, log)):
            yield
    except Exception:
        with contextlib.suppress(OSError):
            traceback.print_exc(file=log)
        raise
    finally:
        with contextlib.suppress(OSError):
            log.close()
