"""Results as JSON, which has no NaN and no infinity."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.recipes.files.write import write_text_atomically


def without_nan(value: Any) -> Any:
    """The same with None for each number that is NaN or infinite.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.files.json import without_nan
    >>> without_nan({"losses": [0.5, float("nan"), float("inf")], "steps": 3})
    {'losses': [0.5, None, None], 'steps': 3}
    """
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_json(text: str) -> Any:
    """:func:`json.loads`, with ValueError as well for lists in lists that are too deep for it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are too deep inside of each other") from None


def write_json(file: Path, value: Any) -> None:
    """Write a value without NaN and infinity; the file appears when it is complete."""
    write_text_atomically(file, json.dumps(value, indent=2, allow_nan=False) + "\n")
