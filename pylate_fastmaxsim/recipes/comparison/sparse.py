"""Trainers of sparse encoders for a comparison."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.sparse_encoder import SparseEncoderTrainer

from pylate_fastmaxsim.integrations.sparse_encoder.names import Router
from pylate_fastmaxsim.recipes.comparison.counters import Counted
from pylate_fastmaxsim.recipes.comparison.phases import Phases
from pylate_fastmaxsim.recipes.models.retriever import encoder_of


class MeasuredTrainer(Counted, SparseEncoderTrainer):
    """Counts tokens; what GradCache encodes without gradients first is not counted twice.

    The padding of queries counts as that of documents.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Below the head, which the plugin passes over.
        encoder = encoder_of(self.model).base_model
        self.stop_counting = encoder.register_forward_pre_hook(self._count_encoded, with_kwargs=True).remove

    def count(self, inputs: dict[str, Any]) -> None:
        (queries, *documents), _ = self.collect_features(inputs)
        if not isinstance(self.model[0], Router):  # else the encoder sees no query
            self.measured["query_tokens"] += queries["attention_mask"].sum()
        for column in documents:
            self.measured["documents"] += len(column["attention_mask"])
            self.measured["live"] += column["attention_mask"].sum()

    def _count_encoded(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.measured["encoded"] += (args[0] if args else kwargs["input_ids"]).numel()


class PhaseTrainer(Phases, SparseEncoderTrainer):
    """Measures the phases of a step."""
