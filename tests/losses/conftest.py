from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version
from sentence_transformers import __version__

# Beside Sentence Transformers 6 PyLate cannot be installed.
if Version(__version__) >= Version("6") or find_spec("pylate") is None:
    collect_ignore = [file.name for file in Path(__file__).parent.glob("test_pylate_*.py")]
