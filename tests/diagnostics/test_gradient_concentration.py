"""Gradient concentration against small cases by hand and against autograd of the float64 definitions."""

import math
from dataclasses import asdict

import pytest
import torch

from pylate_fastmaxsim import LogSumExp, Max, Softmax, TokenBatch, TopK, reference
from pylate_fastmaxsim.diagnostics.gradient_concentration import gradient_concentration

POOLINGS = [Max(), TopK(3), Softmax(0.5), LogSumExp(0.2)]


def ragged(lengths, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(length, 6, generator=generator, dtype=dtype) for length in lengths]
    return TokenBatch.from_list([torch.nn.functional.normalize(row, dim=1) for row in rows])


def gini(norms):
    """The mean absolute difference of two members over twice the mean."""
    return float((norms[:, None] - norms).abs().mean() / (2 * norms.mean()))


@pytest.mark.parametrize("share, expected", [([0, 0, 0, 1], 3 / 4), ([1, 1, 1, 1], 0), ([0, 1, 1, 2], 3 / 8), ([3], 0)])
def test_of_shares_known_by_hand(share, expected):
    """Query tokens are unit vectors of the axes, as often as their document token is to win."""
    length = len(share)
    queries = torch.eye(length).repeat_interleave(torch.tensor(share), dim=0)[None]
    found = gradient_concentration(queries, torch.eye(length)[None], torch.tensor([[0]]), pooling=Max())
    assert found.gini == pytest.approx(expected) and found.gini_uncorrected == pytest.approx(expected - 1 / length)
    won = sum(map(bool, share))
    assert (found.of, found.documents, found.winners_per_document) == ("score", 1, won)
    assert found.winning_share == pytest.approx(won / length)


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("of", ["score", "loss", "loss of candidates"])
def test_against_autograd_of_the_definition(pooling, of):
    queries = ragged([3, 5, 1, 4], seed=0)
    documents = ragged([4, 0, 7, 1, 9, 6], seed=1)
    keep = torch.rand(len(documents.values), generator=torch.Generator().manual_seed(2)) > 0.2
    documents = TokenBatch(documents.values, documents.starts, documents.lengths, 12, keep)
    candidates = None if of == "loss" else torch.tensor([[0, 4], [4, 1], [2, 5], [5, 5]])
    weights = torch.randn(4, 6 if of == "loss" else 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights[:, 0] = 0  # the first document has no gradient of the loss, but winners
    loss_gradient = None if of == "score" else weights
    found = gradient_concentration(queries, documents, candidates, pooling=pooling, loss_gradient=loss_gradient)

    leaf = documents.values.clone().requires_grad_()
    scores = reference.pooled_scores(queries, documents.with_values(leaf), candidates, pooling=pooling)
    if of == "score":
        pairs = zip(candidates.flatten().tolist(), scores.flatten(), strict=True)
        gradients = [(document, torch.autograd.grad(s, leaf, retain_graph=True)[0]) for document, s in pairs]
    else:
        gradients = list(enumerate(torch.autograd.grad(scores, leaf, weights) * 6))
    live, norms = keep.split(documents.lengths.tolist()), []
    for document, gradient in gradients:
        own = gradient.split(documents.lengths.tolist())[document]
        norms.append(own[live[document]].norm(dim=1))
    with_gradient = [norm for norm in norms if norm.sum() > 0]
    ginis = torch.tensor(list(map(gini, with_gradient)))
    assert found.documents == len(with_gradient)
    assert found.gini == pytest.approx(float(ginis.mean()), abs=1e-6)
    assert [each for each in found.ginis if not math.isnan(each)] == pytest.approx(ginis.tolist(), abs=1e-6)
    assert len(found.ginis) == len(norms)
    lengths = torch.tensor([float(len(norm)) for norm in with_gradient])
    assert found.gini_uncorrected == pytest.approx(float((ginis - 1 / lengths).mean()), abs=1e-6)


@pytest.mark.parametrize(("pooling", "k"), [(Max(), 1), (TopK(3), 3), (Softmax(0.5), 1), (LogSumExp(0.2), 1)], ids=str)
@pytest.mark.parametrize("of", ["score", "loss", "loss of candidates"])
def test_winners(pooling, k, of):
    # A document without tokens counts in no mean.
    queries, documents = ragged([3, 5], seed=4), ragged([4, 2, 9, 0], seed=5)
    candidates = None if of == "loss" else torch.tensor([[2, 0], [0, 2]])
    loss_gradient = None if of == "score" else torch.zeros(2, 4 if of == "loss" else 2)
    found = gradient_concentration(queries, documents, candidates, pooling=pooling, loss_gradient=loss_gradient)
    sequences = [batch.values.split(batch.lengths.tolist()) for batch in (queries, documents)]
    won, tokens = {}, {}
    for query, row in enumerate(candidates.tolist() if candidates is not None else [[0, 1, 2]] * 2):
        for document in row:
            similarities = sequences[0][query] @ sequences[1][document].T
            name = (query, document) if of == "score" else document
            best = similarities.topk(min(k, similarities.shape[1])).indices
            won.setdefault(name, set()).update(best.flatten().tolist())
            tokens[name] = similarities.shape[1]
    if of == "loss of candidates":
        tokens[1] = 2  # a document that no query scores has tokens, and no winner
    total = sum(map(len, won.values()))
    assert found.winning_share == pytest.approx(total / sum(tokens.values()))
    assert found.winners_per_document == pytest.approx(total / len(tokens))
    assert found.of == of.split()[0] and math.isnan(found.gini) == (of != "score")


def test_padded_tensors_in_16_bits_are_as_packed_ones_in_float32():
    queries, documents = (ragged([3, 3], 6).values.view(2, 3, 6), ragged([4, 4], 7).values.view(2, 4, 6))
    queries, documents = queries.bfloat16().requires_grad_(), documents.bfloat16().requires_grad_()
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    positives = torch.tensor([[0], [1]])
    with torch.autocast("cpu", torch.bfloat16):
        padded = gradient_concentration(queries, documents, positives, pooling=Softmax(0.5), documents_mask=mask)
    packed = TokenBatch.from_list([row[live > 0].float() for row, live in zip(documents.detach(), mask, strict=True)])
    assert padded == gradient_concentration(queries.detach().float(), packed, positives, pooling=Softmax(0.5))
    assert queries.grad is None and documents.grad is None


@pytest.mark.cuda
@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("of", ["score", "loss"])
def test_on_a_gpu(pooling, of):
    queries, documents = ragged([3, 5], 8, torch.float32), ragged([4, 0, 9], 9, torch.float32)
    candidates = torch.tensor([[0], [2]]) if of == "score" else None
    weights = None if of == "score" else torch.tensor([[0.5, -0.2, -0.3], [-0.1, -0.2, 0.3]])

    def on(device):
        batches = (TokenBatch.from_list([*move(batch, device)]) for batch in (queries, documents))
        options = {"pooling": pooling, "loss_gradient": None if weights is None else weights.to(device)}
        return gradient_concentration(*batches, None if candidates is None else candidates.to(device), **options)

    def move(batch, device):
        return batch.values.to(device).split(batch.lengths.tolist())

    found, expected = asdict(on("cuda")), asdict(on("cpu"))
    assert found.pop("of") == expected.pop("of")
    assert found.pop("ginis") == pytest.approx(expected.pop("ginis"), rel=1e-3, nan_ok=True)
    assert found == pytest.approx(expected, rel=1e-3)


def test_nan_in_a_document_shows():
    documents = torch.eye(4)[None].clone()
    documents[0, 1, 1] = torch.nan
    found = gradient_concentration(torch.eye(4)[None], documents, torch.tensor([[0]]), pooling=Softmax(1.0))
    assert found.documents == 1 and math.isnan(found.gini)


def test_bad_arguments():
    vectors = torch.ones(2, 3, 4)
    right = {"queries": vectors, "documents": vectors, "candidates": torch.tensor([[0], [1]]), "pooling": Max()}
    for changed, said in (
        ({"candidates": None}, "pass candidates for .* or loss_gradient"),
        ({"candidates": None, "loss_gradient": torch.ones(2, 1)}, r"loss_gradient must .*, \(2, 2\), got \(2, 1\)"),
        ({"candidates": torch.tensor([[0], [-1]])}, "candidates must be from 0 to Nd - 1 = 1, got -1"),
        ({"pooling": "max"}, "pooling must be"),
        ({"queries": vectors[0]}, r"queries must be \[N, L, d\], got one text"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^gradient_concentration: {said}"):
            gradient_concentration(**right | changed)
