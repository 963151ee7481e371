"""The context manager of everything that is closed: its end is `close`."""

from __future__ import annotations

from typing import Self


class Closeable:
    """A context manager; `close` is idempotent."""

    def close(self) -> None:
        """Let go of what this holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
