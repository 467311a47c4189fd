"""What a recipe trains on and is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasets import Dataset, IterableDataset

from pylate_fastmaxsim.recipes.evaluation.beir import Collection

if TYPE_CHECKING:
    from sentence_transformers.evaluation import NanoBEIREvaluator


@dataclass(frozen=True)
class RecipeData:
    """Rows to train on, and what to evaluate on.

    That is rows held out of them, a collection in BEIR's layout, sets of NanoBEIR, or nothing.
    """

    train: Dataset | IterableDataset
    held_out: Dataset | None = None
    collection: Collection | None = None
    nano_beir: NanoBEIREvaluator | None = None
