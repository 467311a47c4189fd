"""Tiles of kernels in place of those of the tables."""

from __future__ import annotations

from inspect import unwrap
from types import ModuleType
from typing import NamedTuple

import pytest


def choose_tiles(monkeypatch: pytest.MonkeyPatch, launch: ModuleType, **tiles: NamedTuple) -> None:
    """Launch kernels with these tiles. ``forward`` are those that ``launch`` looks up by ``forward_tiles``."""
    if hasattr(launch, "_plan"):
        monkeypatch.setattr(launch, "_plan", unwrap(launch._plan))  # keeps no plan
    for name, tile in tiles.items():
        monkeypatch.setattr(launch, f"{name}_tiles", lambda *_, tile=tile: tile)
