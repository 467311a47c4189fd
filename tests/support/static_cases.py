"""Static models of every kind that documents, bounds and searches must be right for, on any device."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from pylate_fastmaxsim import SparseIndex, StaticLateInteraction, TokenBatch, reference
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds

VOCABULARY, DIM = 90, 8

# (threshold, cap of neighbours)
CUTS = [("lowest", None), (-0.3, None), (0.0, 7), (0.4, None), (0.7, 3), ("lowest", 12), (0.99, None)]
VALUES = [(0.4, None), (0.7, 3), (1.0, None)]  # the same with keep="value"


def tables(device: str, positive: bool = False) -> tuple[Tensor, Tensor]:
    """Different vectors for queries and documents. Some document tokens have equal ones, and one has zeros.

    ``positive``: all similarities are above 0, so that none is below that of an empty document.
    """
    queries, documents = torch.randn(2, VOCABULARY, DIM, generator=torch.Generator().manual_seed(0))
    if positive:
        queries, documents = queries.abs(), documents.abs()
    documents[20:40] = documents[20] + 1e-3 * documents[20:40]
    documents[50:55] = queries[3]
    documents[60] = 1 if positive else 0
    return queries.to(device), documents.to(device)


def texts(count: int, longest: int, seed: int) -> TokenIds:
    """Random token ids, few of which repeat in a text. The first text is empty and the second repeats one token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest + 1, (count,), generator=generator).tolist()
    rows = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return TokenIds.from_lists([[], [5, 5, 9, 5], *rows])


def save_static(folder: Path, encoder: str, threshold: float = 0.4, **options: object) -> None:
    """A static model of random vectors, most pairs of which are cut."""
    tokenizer = AutoTokenizer.from_pretrained(encoder).backend_tokenizer
    vectors = torch.randn(2, tokenizer.get_vocab_size(), 16, generator=torch.Generator().manual_seed(0))
    StaticLateInteraction(*vectors, tokenizer, threshold=threshold, **options).save(folder)


def save_table(made_by: str, folder: Path, encoder: str) -> Any:
    """A table, or one for each side, as another library saves it; the library's model."""
    from model2vec import StaticModel
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Router, StaticEmbedding

    tokenizer = AutoTokenizer.from_pretrained(encoder).backend_tokenizer
    vectors = torch.randn(2, tokenizer.get_vocab_size(), 16, generator=torch.Generator().manual_seed(0)).numpy()
    if made_by == "model2vec":
        model = StaticModel(vectors[0], tokenizer)
    else:
        module, other = (StaticEmbedding(tokenizer, embedding_weights=table) for table in vectors)
        module = Router.for_query_document([module], [other]) if made_by == "Router" else module
        behind = Dense(16, 16) if made_by == "Dense" else Normalize()
        model = SentenceTransformer(modules=[module, behind], device="cpu")
    model.save_pretrained(str(folder))
    return model


def maxsim(model: StaticLateInteraction, queries: TokenIds, documents: TokenIds) -> Tensor:
    """MaxSim ``[Nq, Nd]`` in float64, without weights, on the CPU."""
    return reference.maxsim(
        *(
            TokenBatch.from_list(list(table.double().cpu()[tokens.ids.long()].split(tokens.lengths.tolist())))
            for table, tokens in ((model.query_vectors, queries), (model.document_vectors, documents))
        )
    )


def check(
    device: str, threshold: float | str, neighbours: int | None, keep: str = "excess", positive: bool = False
) -> None:
    """Documents, scores, bounds and the best documents of one model beside the definitions."""
    model = StaticLateInteraction(*tables(device, positive), threshold=threshold, neighbours=neighbours, keep=keep)
    queries, documents = texts(12, 9, seed=1), texts(60, 25, seed=2)
    thresholds = model.thresholds.cpu()
    maxima = maxsim(model, TokenIds.from_lists([[token] for token in range(VOCABULARY)]), documents).T
    if threshold != "lowest":
        assert bool((thresholds >= threshold).all())
    if neighbours is not None:
        similarities = model.query_vectors.double() @ model.document_vectors.double().T
        assert int((similarities - model.thresholds[:, None] > 1e-12).sum(dim=1).max()) <= neighbours

    batch = model.documents(documents).to("cpu")
    stored = torch.from_numpy(batch.to_scipy().toarray())
    expected = (maxima - thresholds).clamp(min=0)
    if keep == "value":
        rounded = (maxima * 2**20).round() / 2**20
        expected = rounded.masked_fill(rounded < threshold if neighbours is None else maxima <= thresholds, 0)
    assert float((stored.double() - expected).abs().max()) < 1e-6

    exact = maxsim(model, queries, documents)
    vectors = model.queries(queries)
    bounds = reference.sparse_scores(vectors.to("cpu"), batch) + model.bound(vectors).cpu()[:, None]
    assert bool((bounds - exact > -1e-5).all())
    if threshold == "lowest" and neighbours is None:
        assert len(batch.terms) == len(batch) * VOCABULARY  # so that every document is found
        assert float((bounds - exact).abs().max()) < 1e-5

    index = SparseIndex.build([model.documents(documents)])
    expected, places = exact.float().sort(dim=1, descending=True, stable=True)
    for k in (1, 10, 100):
        for asked in (queries, vectors):
            scores, positions = model.search(asked, documents, k)
            assert scores.dtype == torch.float32 and scores.device.type == torch.device(device).type
            assert torch.equal(positions.cpu(), places[:, :k])
            torch.testing.assert_close(scores.cpu(), expected[:, :k], rtol=1e-6, atol=1e-6)
        scores, positions = (each.cpu() for each in model.search(vectors, index, k))
        torch.testing.assert_close(scores, bounds.gather(1, positions.clamp(min=0)).float() * (positions >= 0))
