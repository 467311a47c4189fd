"""Files and folders that are replaced in one step: at any time the old one or the new one is there, whole."""

import ctypes
import errno
import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Files and folders that are being written begin with it.
SCRATCH = "unfinished-"

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux
# What file systems and systems without an exchange answer.
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def replace_file(file: Path, content: bytes | Callable[[str], Any]) -> None:
    """Write a file that appears under its name when it is complete and on the disk.

    ``content`` is what it is to hold, or a function that writes it under the name that it is given, which ends as that of
    the file does. If writing fails, nothing has changed.
    ValueError if there is something else than a regular file under the name, as a device or a link.
    """
    require_replaceable(file)
    scratch = _scratch(file)
    try:
        with naming(file):
            # Not tempfile, whose files nobody else can read.
            with open(scratch, "xb") as written:
                if isinstance(content, bytes):
                    written.write(content)
            if not isinstance(content, bytes):
                mode = scratch.stat().st_mode
                content(str(scratch))
                scratch.chmod(mode)  # files of safetensors are for their owner only
            sync(scratch)
            os.replace(scratch, file)
    except BaseException:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
    with naming(file):
        sync(file.parent)


def write_json(file: Path, value: Any) -> None:
    """Replace a file by one that holds a value without NaN and infinity."""
    replace_file(file, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def replace_folder(folder: Path, write: Callable[[Path], Any]) -> None:
    """Replace a folder by the one that ``write`` makes under the name that it is given; if it fails, nothing has changed.

    On Linux the two are exchanged in one step. On file systems that cannot do so, and elsewhere, there is no folder under
    the name for a moment; a process that is killed then leaves the old one beside it.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder} must be a folder, or not be there, to be replaced.")
    scratch = _scratch(folder)
    try:
        write(scratch)
        for root, _, names in os.walk(scratch, topdown=False):
            for name in names:
                sync(Path(root, name))
            sync(Path(root))
        _exchange(scratch, folder) if folder.exists() else os.replace(scratch, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_file(file: Path) -> None:
    """Remove a file, if it is there; a power cut does not bring it back beside what is written afterwards."""
    file.unlink(missing_ok=True)
    sync(file.parent)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Context whose OSError, as of a full disk, names the file that is being written unless it names another.

    An error of safetensors that has another type becomes one.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or not (error.filename is None or SCRATCH in str(error.filename)):
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error
    except Exception as error:
        if (code := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from error


def require_replaceable(file: Path) -> None:
    """Raise ValueError if there is something else than a regular file under the name."""
    if (what := reason_against_replacing(file)) is not None:
        raise ValueError(f"{file} must be a file that can be replaced, or not be there, but it is {what}.")


def reason_against_replacing(file: Path) -> str | None:
    """Name what is in the place of a file, if it is something else than a regular file."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        return "a link" if file.is_symlink() else "a folder" if file.is_dir() else "no regular file"
    return None


def remove_scratch(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes have left unfinished in a folder, of which the caller holds the lock; or of one name."""
    for path in folder.glob(f"{SCRATCH}*" if name is None else f"{SCRATCH}????????-{glob.escape(name[-50:])}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _scratch(path: Path) -> Path:
    # Of its own for each call, so that two processes never write one file. Names have at most 255 bytes.
    return path.with_name(f"{SCRATCH}{secrets.token_hex(4)}-{path.name[-50:]}")


def _exchange(new: Path, old: Path) -> None:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or a C library from before 2018
        code = errno.ENOSYS
    else:
        done = renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
        code = ctypes.get_errno() if done else 0
    if code in _NO_EXCHANGE:
        aside = _scratch(old)
        os.replace(old, aside)
        try:
            os.replace(new, old)
        except BaseException:
            os.replace(aside, old)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    elif code:
        raise OSError(code, os.strerror(code), str(old))


def sync(path: Path) -> None:
    """Have a file or the entries of a folder on the disk: a power cut must not leave a name of what was never written."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
