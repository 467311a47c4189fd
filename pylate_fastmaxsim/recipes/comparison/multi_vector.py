"""Trainers of MultiVectorEncoders for a comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pylate_fastmaxsim.recipes.comparison.counters import Counted
from pylate_fastmaxsim.recipes.comparison.phases import Phases
from pylate_fastmaxsim.recipes.models.retriever import encoder_of
from pylate_fastmaxsim.recipes.training.multi_vector import CARD_TRAINER


class MeasuredTrainer(Counted, CARD_TRAINER):
    """Counts tokens; what GradCache encodes without gradients first is not counted twice.

    The padding of queries counts as that of documents; tokens of an expanded query are none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Not of the encoder: Sentence Transformers calls its method forward, which runs no hooks.
        embeddings = encoder_of(self.model).get_input_embeddings()
        self.stop_counting = embeddings.register_forward_pre_hook(self._count_encoded).remove

    def count(self, inputs: dict[str, Any]) -> None:
        (queries, *documents), _ = self.collect_features(inputs)
        self.measured["query_tokens"] += _tokens(queries)
        for column in documents:
            self.measured["documents"] += _texts(column)
            self.measured["live"] += _tokens(column)

    def _count_encoded(self, module: torch.nn.Module, args: tuple[Tensor]) -> None:
        if torch.is_grad_enabled():
            self.measured["encoded"] += args[0].numel()


def _texts(column: dict[str, Any]) -> int:
    # With FlashAttention, Sentence Transformers writes the texts of a column one after the other.
    return len(column["cu_seq_lens_q"]) - 1 if "cu_seq_lens_q" in column else len(column["input_ids"])


def _tokens(column: dict[str, Any]) -> Tensor | int:
    if "cu_seq_lens_q" in column:
        return column["input_ids"].numel()
    live = column["attention_mask"].bool()
    if "query_expansion_positions" in column:
        live = live | column["query_expansion_positions"].bool()
    return live.sum()


class PhaseTrainer(Phases, CARD_TRAINER):
    """Measures the phases of a step."""
