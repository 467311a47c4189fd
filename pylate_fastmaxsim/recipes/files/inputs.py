"""What a command reads, which it must not replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.recipes.files.write import require_output


def inputs_of(*sections: Any) -> list[Path]:
    """The paths among the keys of a recipe's sections; names on the Hub are among them.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection
    >>> from pylate_fastmaxsim.recipes.config.schema import DataSection
    >>> from pylate_fastmaxsim.recipes.files.inputs import inputs_of
    >>> list(map(str, inputs_of(ColBERTSection(name_or_path="base"), DataSection(source="files", files=["a.csv", "b.csv"]))))
    ['base', 'a.csv', 'b.csv']
    """
    found = []
    for section in sections:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if dataclasses.is_dataclass(value):
                found += inputs_of(value)
            elif field.metadata.get("path") and value is not None:
                found += map(Path, value if isinstance(value, list) else [value])
    return found


def require_outputs(key: str, folder: Path, names: Sequence[str], *sections: Any) -> None:
    """Refuse files in a folder that a command must not replace, since it reads them or they are no files.

    Raises
    ------
    RecipeError
        As :func:`~pylate_fastmaxsim.recipes.files.write.require_output`; ``sections`` are those that are read.
    """
    for name in names:
        require_output(key, folder / name, inputs_of(*sections))
