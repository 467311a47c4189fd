"""A static model in a folder: tables, tokenizer, and a description that is written last."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from pylate_fastmaxsim.files.replace import replace_file

DESCRIPTION_FILE = "static_late_interaction.json"
FORMAT = "pylate-fastmaxsim static late interaction 1"
_TABLES, _TOKENIZER = "tables.safetensors", "tokenizer.json"


def write(where: str, folder: Path, values: dict, tensors: dict[str, Tensor], tokenizer: Callable) -> None:
    """Write a model, in place of one that the folder holds."""
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(tokenizer, "to_str"):
        raise ValueError(
            f"{where}: the tokenizer must be of the tokenizers library or a fast one of Transformers, which have a file "
            f"format, got {type(tokenizer).__name__}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION_FILE).unlink(missing_ok=True)
    # Not save_file, whose files nobody else can read.
    tables = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    text = json.dumps({"format": FORMAT, **values}, indent=2) + "\n"
    for name, content in (
        (_TABLES, tables),
        (_TOKENIZER, tokenizer.to_str().encode()),
        (DESCRIPTION_FILE, text.encode()),
    ):
        replace_file(folder / name, content)


def read(where: str, folder: Path, device: torch.device) -> tuple[dict, dict[str, Tensor], Callable]:
    """What :func:`write` has written; ValueError if it is not there, of another format or damaged."""
    from tokenizers import Tokenizer

    file = folder / DESCRIPTION_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{where}: {folder} holds no static model, since it has no {DESCRIPTION_FILE}.") from None
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise ValueError(f"{where}: {file} must be of the format {FORMAT!r}.")
    try:
        tensors = load_file(folder / _TABLES, device=str(device))
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"{where}: {folder / _TABLES} is missing or damaged ({error}).") from None
    return values, tensors, Tokenizer.from_file(str(folder / _TOKENIZER))
