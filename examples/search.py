"""Exact search with a ColBERT of PyLate: by PyLate's scores of padded texts, and by ``search``."""

from collections.abc import Callable
from typing import Any

from pylate import models
from pylate.scores import colbert_scores
from torch.nn.utils.rnn import pad_sequence

from made_up import encoder, now, rows
from pylate_fastmaxsim.retrieval.search import search

model = models.ColBERT(encoder(), document_length=300)  # random weights; yours: "lightonai/GTE-ModernColBERT-v1"
texts = rows(500)  # yours: any lists of texts
documents = model.encode([row["positive"] for row in texts], is_query=False, convert_to_tensor=True)
queries = model.encode([row["query"] for row in texts[:20]], is_query=True, convert_to_tensor=True)


def by_pylate() -> tuple:
    padded = pad_sequence(documents, batch_first=True)
    mask = pad_sequence([document.new_ones(len(document)) for document in documents], batch_first=True)
    return colbert_scores(pad_sequence(queries, batch_first=True), padded, documents_mask=mask).topk(10)


def timed(title: str, call: Callable[[], tuple]) -> Any:
    call()  # a GPU compiles kernels when it first runs them
    begin = now()
    scores, positions = call()  # [20, 10] each, best first
    print(f"{title}: {1000 * (now() - begin):.0f} ms")
    return positions


same = timed("PyLate", by_pylate) == timed("search", lambda: search(queries, documents, k=10))
print(f"the same documents: {bool(same.all())}")
