"""Trainers of models of pages for a comparison."""

from __future__ import annotations

from typing import Any

from pylate_fastmaxsim.recipes.comparison.counters import Counted
from pylate_fastmaxsim.recipes.comparison.phases import Phases
from pylate_fastmaxsim.recipes.training.visual import PageTrainer


class MeasuredTrainer(Counted, PageTrainer):
    """Counts tokens.

    A vision-language model is given every page padded to the longest of its batch, stock and fast.
    """

    def count(self, inputs: dict[str, Any]) -> None:
        queries = inputs[f"{self.query_prefix}input_ids"].numel()
        self.measured["query_tokens"] += queries
        self.measured["encoded"] += queries
        for prefix in (self.pos_prefix, self.neg_prefix):
            mask = inputs.get(f"{prefix}attention_mask")
            if mask is not None:
                self.measured["documents"] += mask.shape[:-1].numel()
                self.measured["live"] += mask.sum()
                self.measured["encoded"] += mask.numel()


class PhaseTrainer(Phases, PageTrainer):
    """Measures the phases of a step."""
