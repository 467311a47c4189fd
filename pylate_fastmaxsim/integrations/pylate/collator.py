"""How many tokens a column attends to: counted by PyLate's collator, taken out of the batch by the trainer."""

from __future__ import annotations

from functools import wraps

from pylate.utils import ColBERTCollator
from sentence_transformers import SentenceTransformerTrainer
from torch import Tensor

from pylate_fastmaxsim.integrations.encoding.batch import has_gaps
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL, TokenCounts, attach_token_counts
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.patches import Patch

_MASK = "_attention_mask"

# What it inherits may be replaced there later.
_INHERITED = "_prepare_inputs" not in vars(SentenceTransformerTrainer)


def patches() -> list[Patch]:
    """What to replace in PyLate and in the trainer of Sentence Transformers."""
    return [
        Patch(ColBERTCollator, "__call__", collate),
        Patch(SentenceTransformerTrainer, "_prepare_inputs", prepare_inputs),
    ]


@wraps(ColBERTCollator.__call__)
def collate(self: ColBERTCollator, features: list[dict]) -> dict[str, Tensor]:
    # Counted here, on the CPU and in a worker, so that packing waits for no device. A worker that
    # imports PyLate afresh (start method spawn) adds nothing, and packing counts itself.
    batch = collate.__wrapped__(self, features)
    options = current_options()
    if options is None or not options.padding_free:
        return batch
    # A subclass that has its own __call__ comes here by super() and may change the masks afterwards.
    if type(self).__call__ is not collate:
        return batch
    for key in [key for key in batch if key.endswith(_MASK)]:
        # A mask with gaps cannot be packed, and is found without counts.
        if not has_gaps(batch[key]):
            batch[f"{key.removesuffix(_MASK)}_{TOKEN_TOTAL}"] = TokenCounts.of(batch[key])
    return batch


@wraps(SentenceTransformerTrainer._prepare_inputs)
def prepare_inputs(self: SentenceTransformerTrainer, inputs: object) -> object:
    batch = (
        super(SentenceTransformerTrainer, self)._prepare_inputs(inputs)
        if _INHERITED
        else prepare_inputs.__wrapped__(self, inputs)
    )
    # A trainer's compute_loss and a loss then see what stock's collator makes, and may pick, join or reorder its rows.
    # The trainer divides the batch into columns later, where `negative` also gets what belongs to a column
    # `negative_1`. A collator of somebody's own may make a batch of another type, which their compute_loss takes apart.
    return attach_token_counts(batch) if isinstance(batch, dict) else batch
