"""Triton's interpreter, mended where it fails on our kernels.

Triton decides when a kernel is defined whether it is interpreted, so a process interprets all kernels or none.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from pylate_fastmaxsim.kernels.primitives import running_best, running_maximum
from tests.support.kernels_on_cpu import kernels_on_cpu


def _values(operand) -> np.ndarray:
    dtype = operand.dtype.scalar
    if dtype not in (tl.bfloat16, tl.float8e4nv):
        return operand.data
    return interpreter._convert_float(operand.data, dtype, tl.float32, None).view(np.float32)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    # Exactly, and then rounded: in float32 BLAS may give equal columns products that differ in the last bit.
    product = np.matmul(_values(a), _values(b), dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _create_fp_to_fp(self, src, dst_type, rounding_mode):
    # The interpreter truncates.
    if dst_type.scalar != tl.float8e4nv:
        return _fp_to_fp(self, src, dst_type, rounding_mode)
    rounded = torch.from_numpy(src.data).to(torch.float8_e4m3fn).view(torch.uint8)
    return interpreter.TensorHandle(rounded.numpy(), dst_type.scalar)


_fp_to_fp = interpreter.InterpreterBuilder.create_fp_to_fp


def _one_nan(numbers: np.ndarray) -> np.ndarray:
    if numbers.dtype.kind != "f":
        return numbers
    return np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers)


def _create_maximumf(self, a, b):
    return interpreter.TensorHandle(_one_nan(np.maximum(a.data, b.data)), a.dtype.scalar)


_REDUCTIONS = {
    "maximum_or_nan": lambda numbers, axis: _one_nan(np.max(numbers, axis=axis)),
    "_xor_combine": lambda numbers, axis: np.bitwise_xor.reduce(numbers, axis=axis),
    "either": lambda numbers, axis: np.bitwise_or.reduce(numbers, axis=axis),
}


def _generic_reduce(self, inputs):
    reduce = _REDUCTIONS[self.combine_fn.fn.__name__]
    reduced = [reduce(tensor.handle.data, self.axis) for tensor in inputs]
    if self.keep_dims:
        reduced = [np.expand_dims(numbers, self.axis) for numbers in reduced]
    return [self.to_tensor(numbers, tensor.dtype) for numbers, tensor in zip(reduced, inputs, strict=True)]


@triton.jit
def _eight_more_unless_same(total, a, b):
    return total + tl.where(running_maximum.same_bits(a, b), 0, 8)


@triton.jit
def _inserted_groups(v0, v1, v2, v3, g0, g1, g2, g3, x, group):
    g3 = tl.where(x > v2, g2, tl.where(x > v3, group, g3))
    g2 = tl.where(x > v1, g1, tl.where(x > v2, group, g2))
    g1 = tl.where(x > v0, g0, tl.where(x > v1, group, g1))
    return tl.where(x > v0, group, g0), g1, g2, g3


_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope):
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype] = {}


def _known_np_dtype(dtype) -> np.dtype:
    return _np_dtypes.get(dtype.name) or _np_dtypes.setdefault(dtype.name, _np_dtype(dtype))


def _init_tuple(self, args, type=None) -> None:
    self.values, self._type = list(args), type


def _type_of_tuple(self):
    if self._type is None:
        return tl.core._type_for_tuple_values(self.values)
    return self._type if isinstance(self._type, tl.core.tuple_type) else tl.core.tuple_type(self._type)


@contextmanager
def mended() -> Iterator[None]:
    """The interpreter multiplies bits of bf16, truncates to e4m3, cannot convert sizes under NumPy 2.4, reduces slowly, has no assembly."""
    with ExitStack() as stack:
        for owner, name, replacement in (
            (interpreter.InterpreterBuilder, "create_dot", _create_dot),
            # As of a GPU a maximum that is NaN is always the same one, of whatever sign and bits the operands are.
            (interpreter.InterpreterBuilder, "create_maximumf", _create_maximumf),
            (interpreter.InterpreterBuilder, "create_fp_to_fp", _create_fp_to_fp),
            (interpreter.ReduceOps, "generic_reduce", _generic_reduce),
            (interpreter, "_patch_lang_tensor", _patch_with_index),
            # The interpreter takes less time where no shape's type is made that nobody asks for, and no table a call.
            (interpreter, "_get_np_dtype", _known_np_dtype),
            (tl.core.tuple, "__init__", _init_tuple),
            (tl.core.tuple, "type", property(_type_of_tuple, lambda self, type: setattr(self, "_type", type))),
            # Assembly, which no interpreter runs.
            (running_maximum, "_eight_more_unless_same", _eight_more_unless_same),
            (running_best, "inserted_groups", _inserted_groups),
        ):
            stack.enter_context(patch.object(owner, name, replacement, create=name == "type"))
        # Once, where the interpreter looks through the language again at each call of a function: half of its time.
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        stack.callback(scope.restore)
        stack.enter_context(patch.object(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope()))
        yield


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """Operators on a CPU run kernels, which this process interprets; otherwise the test is skipped."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled in this process; run it with TRITON_INTERPRET=1")
    with mended(), kernels_on_cpu():
        yield
