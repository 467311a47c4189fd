"""The collator of a SparseEncoder counts the tokens of each text; its trainer takes the counts out of the batch."""

from __future__ import annotations

import os
from functools import wraps

from sentence_transformers.sparse_encoder import SparseEncoderTrainer
from sentence_transformers.sparse_encoder.data_collator import SparseEncoderDataCollator
from torch import Tensor

from pylate_fastmaxsim.integrations.encoding.collated import add_token_counts
from pylate_fastmaxsim.integrations.encoding.token_counts import attach_token_counts
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.patches import Patch


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers. Both methods are inherited, and called on the parent class."""
    return [
        Patch(SparseEncoderDataCollator, "__call__", collate),
        Patch(SparseEncoderTrainer, "_prepare_inputs", prepare_inputs),
    ]


@wraps(SparseEncoderDataCollator.__call__)
def collate(self: SparseEncoderDataCollator, features: list[dict]) -> dict[str, Tensor]:
    # A worker with start method spawn imports Sentence Transformers afresh and adds no counts.
    batch = super(SparseEncoderDataCollator, self).__call__(features)
    options = current_options()
    # A subclass with its own __call__ may change the masks afterwards.
    if options is None or not options.padding_free or type(self).__call__ is not collate:
        return batch
    # Of a streamed dataset one process hands batches to all others, by NCCL, which takes nothing that stays on the CPU.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return batch
    return add_token_counts(batch)


@wraps(SparseEncoderTrainer._prepare_inputs)
def prepare_inputs(self: SparseEncoderTrainer, inputs: object) -> object:
    batch = super(SparseEncoderTrainer, self)._prepare_inputs(inputs)
    # A user's collator may return another type than dict.
    return attach_token_counts(batch) if isinstance(batch, dict) else batch
