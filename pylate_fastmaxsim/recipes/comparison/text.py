"""Trainers of text encoders for a comparison."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainer

from pylate_fastmaxsim.recipes.comparison.counters import Counted
from pylate_fastmaxsim.recipes.comparison.phases import Phases


class MeasuredTrainer(Counted, SentenceTransformerTrainer):
    """Counts tokens; what GradCache encodes without gradients first is not counted twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        encoder = self.model[0].auto_model
        self.stop_counting = encoder.register_forward_pre_hook(self._count_encoded, with_kwargs=True).remove

    def count(self, inputs: dict[str, Any]) -> None:
        (queries, *documents), _ = self.collect_features(inputs)
        self.measured["query_tokens"] += queries["input_ids"].numel()
        for column in documents:
            self.measured["documents"] += len(column["attention_mask"])
            self.measured["live"] += column["attention_mask"].sum()

    def _count_encoded(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.measured["encoded"] += kwargs["input_ids"].numel()


class PhaseTrainer(Phases, SentenceTransformerTrainer):
    """Measures the phases of a step."""
