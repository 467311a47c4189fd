from __future__ import annotations

from importlib import import_module
from pathlib import Path

try:
    import_module("pylate")
except ImportError:  # Sentence Transformers 6 excludes it
    alone = ("test_multi_vector", "test_fewer_tokens")
    collect_ignore = [file.name for file in Path(__file__).parent.glob("test_*.py") if not file.name.startswith(alone)]
