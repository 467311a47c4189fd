"""What products and sums are computed in."""

import torch


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype: float64 for float64 input, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def float32_precision(dtype: torch.dtype) -> str:
    """``"highest"``, ``"high"`` or ``"medium"`` for vectors of `dtype`.

    As ``torch.set_float32_matmul_precision`` has it. Where TF32 was asked for otherwise
    (``torch.backends.cuda.matmul.allow_tf32``, ``torch.backends.fp32_precision``, which
    ``TrainingArguments(tf32=True)`` sets), that is ``"high"``. Vectors that are not float32 have no other products than
    ``"highest"``.

    Examples
    --------
    >>> float32_precision(torch.float32)
    'highest'
    """
    if dtype != torch.float32:
        return "highest"
    # Of PyTorch 2.9 and newer. The older setting writes to it, but not the other way round: once both were used,
    # get_float32_matmul_precision() raises or is out of date.
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if newer is not None and newer != "tf32":
        return "highest"
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high"
    return "high" if newer == "tf32" and older == "highest" else older
