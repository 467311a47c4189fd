"""PyLate's collator counts the tokens of each text; the trainer takes the counts out of the batch."""

from __future__ import annotations

from functools import wraps

from pylate.utils import ColBERTCollator
from sentence_transformers import SentenceTransformerTrainer
from torch import Tensor

from pylate_fastmaxsim.integrations.encoding.collated import add_token_counts
from pylate_fastmaxsim.integrations.encoding.token_counts import attach_token_counts
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.patches import Patch

# An inherited method is called on the parent class, where it may be replaced later.
_INHERITED = "_prepare_inputs" not in vars(SentenceTransformerTrainer)


def patches() -> list[Patch]:
    """What to replace in PyLate and in the trainer of Sentence Transformers."""
    return [
        Patch(ColBERTCollator, "__call__", collate),
        Patch(SentenceTransformerTrainer, "_prepare_inputs", prepare_inputs),
    ]


@wraps(ColBERTCollator.__call__)
def collate(self: ColBERTCollator, features: list[dict]) -> dict[str, Tensor]:
    # A worker with start method spawn imports PyLate afresh and adds no counts.
    batch = collate.__wrapped__(self, features)
    options = current_options()
    if options is None or not options.padding_free:
        return batch
    # A subclass with its own __call__ may change the masks afterwards.
    if type(self).__call__ is not collate:
        return batch
    return add_token_counts(batch)


@wraps(SentenceTransformerTrainer._prepare_inputs)
def prepare_inputs(self: SentenceTransformerTrainer, inputs: object) -> object:
    batch = (
        super(SentenceTransformerTrainer, self)._prepare_inputs(inputs)
        if _INHERITED
        else prepare_inputs.__wrapped__(self, inputs)
    )
    # A compute_loss and a loss see the batch of stock's collator. Here, not where the trainer divides it into columns:
    # there `negative` also gets the keys of a column `negative_1`. A user's collator may return another type than dict.
    return attach_token_counts(batch) if isinstance(batch, dict) else batch
