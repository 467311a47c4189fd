"""The pooling of a recipe in PyLate's evaluators, which score with the maximum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pylate.evaluation import colbert_distillation, colbert_triplet
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pylate_fastmaxsim.ops.pooled import Max, Pooling
from pylate_fastmaxsim.recipes.scores import score_metric

ScoreFunction = Callable[[Tensor, Tensor], Tensor]


def score_functions(pooling: Pooling) -> dict[str, ScoreFunction] | None:
    """What retrieval evaluators take as ``score_functions``, by the name of the pooling; None for the maximum."""
    return None if isinstance(pooling, Max) else {type(pooling).__name__: _scores(pooling, own_documents=False)}


@contextmanager
def pooled_pairs(pooling: Pooling) -> Iterator[None]:
    """The evaluators of triplets and of distillation pool like this within the block."""
    if isinstance(pooling, Max):
        yield
        return
    replaced = ((colbert_triplet, "colbert_scores_pairwise"), (colbert_distillation, "colbert_kd_scores"))
    originals = [getattr(module, name) for module, name in replaced]
    for module, name in replaced:
        setattr(module, name, _scores(pooling, own_documents=True))
    try:
        yield
    finally:
        for (module, name), original in zip(replaced, originals, strict=True):
            setattr(module, name, original)


def _scores(pooling: Pooling, own_documents: bool) -> ScoreFunction:
    """Scores of the embeddings that an evaluator has. It pads with rows of zeros and has no masks."""

    def scores(queries_embeddings: Tensor | Sequence[Tensor], documents_embeddings: Tensor | Sequence[Tensor]):
        queries, documents = _padded(queries_embeddings), _padded(documents_embeddings)
        groups = documents if documents.dim() == 4 else documents.unsqueeze(1)
        # Of the state that the plugin is in now.
        found = score_metric(pooling, own_documents)(queries, groups, _live(queries), _live(groups))
        return found.squeeze(1) if own_documents and documents.dim() == 3 else found

    return scores


def _padded(embeddings: Tensor | Sequence[Tensor]) -> Tensor:
    return embeddings if isinstance(embeddings, Tensor) else pad_sequence(list(embeddings), batch_first=True)


def _live(embeddings: Tensor) -> Tensor:
    return (embeddings != 0).any(dim=-1)
