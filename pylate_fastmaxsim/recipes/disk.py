"""Tell a disk that takes no more from every other error: each library has its own way to say so."""

from __future__ import annotations

import errno
import os
import re

CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}

# safetensors puts the number of the system's error into its text; torch.save keeps none at all.
_NUMBERED = re.compile(r"\(os error (\d+)\)")
_TORCH_SAVE = ("inline_container.cc", "PytorchStreamWriter failed")


def write_failure(error: BaseException) -> str | None:
    """Why nothing could be written, or None where ``error`` is about something else.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.disk import write_failure
    >>> write_failure(OSError(28, "No space left on device", "model.safetensors"))
    'model.safetensors cannot be written: No space left on device'
    >>> write_failure(ValueError("something else"))
    """
    if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
        return f"{error.filename or 'a file'} cannot be written: {os.strerror(error.errno)}"
    numbered = _NUMBERED.search(str(error))
    if numbered and int(numbered[1]) in CANNOT_WRITE:
        return f"a file cannot be written: {os.strerror(int(numbered[1]))}"
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _TORCH_SAVE):
        return "a checkpoint cannot be written to its end, as on a full disk"
    return None
