"""Attributes that are replaced for a while and put back in the reverse order."""

from __future__ import annotations

from typing import Any


class Patches:
    """A stack of replaced attributes."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._replaced:
            owner, name, value = self._replaced.pop()
            setattr(owner, name, value)
