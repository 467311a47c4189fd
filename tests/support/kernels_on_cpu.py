"""Operators that take the kernels' way for tensors on a CPU."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from unittest.mock import patch

from pylate_fastmaxsim import kernels
from pylate_fastmaxsim.ops.operands import KERNEL_DTYPES


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    # All modules with kernels are there to be patched.
    for folder in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        if find_spec(f"{folder.name}.launch"):
            importlib.import_module(f"{folder.name}.launch")
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("pylate_fastmaxsim.") and hasattr(module, "runs_kernels"):
                takes = patch.object(module, "runs_kernels", lambda values: values.dtype in KERNEL_DTYPES)
                stack.enter_context(takes)
        yield
