"""Exact search with a ColBERT of PyLate: scores of padded texts, and ``search``."""

from pylate import models
from pylate.scores import colbert_scores
from torch.nn.utils.rnn import pad_sequence

from made_up import encoder, now, rows
from pylate_fastmaxsim.retrieval.search import search

model = models.ColBERT(encoder(), document_length=300)  # random weights; yours: "lightonai/GTE-ModernColBERT-v1"
texts = rows(500)
documents = model.encode([row["positive"] for row in texts], is_query=False, convert_to_tensor=True)
queries = model.encode([row["query"] for row in texts[:20]], is_query=True, convert_to_tensor=True)

begin = now()
padded = pad_sequence(documents, batch_first=True)
mask = pad_sequence([document.new_ones(len(document)) for document in documents], batch_first=True)
best = colbert_scores(pad_sequence(queries, batch_first=True), padded, documents_mask=mask).topk(10)
print(f"PyLate: {1000 * (now() - begin):.0f} ms")

begin = now()
scores, positions = search(queries, documents, k=10)  # [20, 10] each, best first
print(f"search: {1000 * (now() - begin):.0f} ms, the same documents: {bool((positions == best.indices).all())}")
