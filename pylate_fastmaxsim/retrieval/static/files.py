"""A static model in a folder: tables, tokenizer, and a description that is written last."""

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from pylate_fastmaxsim.files.lock import writing
from pylate_fastmaxsim.files.record import checksum, read_again_if_replaced, read_record, write_record
from pylate_fastmaxsim.files.replace import replace_file

DESCRIPTION_FILE = "static_late_interaction.json"
FORMAT = "pylate-fastmaxsim static late interaction 2"


def write(where: str, folder: Path, values: dict, tensors: dict[str, Tensor], tokenizer: Callable | None) -> None:
    """Write a model, in place of one that the folder holds, which is there until the new one is complete."""
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if tokenizer is not None and not hasattr(tokenizer, "to_str"):
        raise ValueError(
            f"{where}: the tokenizer must be of the tokenizers library or a fast one of Transformers, which have a file "
            f"format, got {type(tokenizer).__name__}."
        )
    contents = {"tables": (save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}), "safetensors")}
    if tokenizer is not None:
        contents["tokenizer"] = tokenizer.to_str().encode(), "json"
    with writing(where, folder):
        try:
            before = set(read_record(folder / DESCRIPTION_FILE)["files"].values())
        except (ValueError, TypeError, KeyError, AttributeError):  # none, or a damaged one
            before = set()
        files = {}
        for name, (content, ending) in contents.items():
            # Another name for another content: who reads the old description never reads it.
            files[name] = f"{name}-{checksum(content)}.{ending}"
            replace_file(folder / files[name], content)
        write_record(folder / DESCRIPTION_FILE, {"format": FORMAT, "files": files, **values})
        # Those of the model before stay for who is reading it.
        for file in (*folder.glob("tables-*"), *folder.glob("tokenizer-*")):
            if file.name not in before | set(files.values()):
                file.unlink()


def read(where: str, folder: Path) -> tuple[dict, dict[str, Tensor], Callable | None]:
    """Read what :func:`write` has written; ValueError if it is not there, of another format or damaged."""
    from tokenizers import Tokenizer

    def contents() -> tuple[dict, dict[str, bytes]]:
        try:
            values = read_record(folder / DESCRIPTION_FILE, FORMAT)
        except ValueError as error:
            raise ValueError(f"{where}: {error} Save the model again.") from None
        if values is None:
            raise ValueError(f"{where}: {folder} holds no static model, since it has no {DESCRIPTION_FILE}.")
        return values, {name: _content(where, folder / file) for name, file in values["files"].items()}

    values, found = read_again_if_replaced(folder / DESCRIPTION_FILE, contents)
    tokenizer = Tokenizer.from_str(found["tokenizer"].decode()) if "tokenizer" in found else None
    return values, load(found["tables"]), tokenizer


def _content(where: str, file: Path) -> bytes:
    try:
        content = file.read_bytes()
    except OSError:
        content = b""
    if checksum(content) != file.stem.partition("-")[2]:
        raise ValueError(f"{where}: {file} is missing or damaged; save the model again.")
    return content
