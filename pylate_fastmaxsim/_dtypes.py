"""Dtypes of sums, and the precision of float32 products."""

import torch


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype: float64 for float64 input, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def float32_precision(dtype: torch.dtype) -> str:
    """The setting of ``torch.set_float32_matmul_precision`` for vectors of ``dtype``; ``"highest"`` unless float32.

    Other ways to ask for TF32 count as ``"high"``: ``torch.backends.cuda.matmul.allow_tf32``, and
    ``torch.backends.fp32_precision``, which ``TrainingArguments(tf32=True)`` sets. Kernels
    read it as they are launched, as PyTorch does: in a compiled graph and in the backward too.

    Examples
    --------
    >>> float32_precision(torch.float32)
    'highest'
    """
    if dtype != torch.float32:
        return "highest"
    # PyTorch 2.9 and newer. The older setting writes to this one, but not the reverse: once both were used,
    # get_float32_matmul_precision() raises or is out of date.
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if newer is not None and newer != "tf32":
        return "highest"
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high"
    return "high" if newer == "tf32" and older == "highest" else older
