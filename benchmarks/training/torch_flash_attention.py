"""A substitute for the package flash_attn, as far as transformers calls it in training, over PyTorch's FlashAttention.

flash-attn has no wheels on PyPI and compiles for hours; PyTorch contains the same kernels. Where flash-attn is
installed, it is measured instead.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

_MODULE = """
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_flash_attention_utils import _pad_input as pad_input
from transformers.modeling_flash_attention_utils import _unpad_input as unpad_input


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
):
    if dropout_p:
        raise NotImplementedError("the benchmark's encoders have no dropout in attention")
    window = (window_size[0], 0) if causal else tuple(window_size)
    return varlen_attn(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=softmax_scale, window_size=window
    )


def flash_attn_func(*args, **kwargs):
    raise NotImplementedError("the benchmark has texts of different lengths only")


flash_attn_with_kvcache = flash_attn_func
"""


def provide(directory: Path) -> str:
    """Make ``flash_attn`` importable in this process from ``directory``, and return what implements it.

    Call it before transformers is imported.
    """
    if importlib.util.find_spec("flash_attn") is not None:
        return f"flash-attn {importlib.metadata.version('flash-attn')}"
    package, record = directory / "flash_attn", directory / "flash_attn-2.8.3.dist-info"
    package.mkdir(parents=True)
    record.mkdir()
    (package / "__init__.py").write_text(_MODULE)
    (package / "bert_padding.py").write_text("from flash_attn import pad_input, unpad_input\n")
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (record / "top_level.txt").write_text("flash_attn\n")
    sys.path.insert(0, str(directory))
    return "FlashAttention of PyTorch"
