"""``encode`` and losses of a ColBERT: its skiplist and masks, PyLate's rule for these, and calls without padding."""

from functools import partial

import pytest
import torch
from pylate import losses
from pylate.losses.contrastive import extract_skiplist_mask
from pylate.scores import ColBERTScores
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim import PooledScores, encode, maxsim
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka
from tests.support.compared import assert_as_stock, assert_equal, batch_of, run
from tests.support.encoded import calls_of, tokens_of
from tests.support.loss_hosts import LABELS, OPTIONS, VIEWS, ByHand, one_column
from tests.support.models import load_model


@pytest.fixture
def wide(encoder):
    """A ModernBERT whose local layers see all of a query, so that queries are encoded with packed documents."""
    return load_model(encoder("modernbert", local_attention=24), do_query_expansion=False).double()


@pytest.mark.parametrize("options", [{}, {"do_query_expansion": False}])
def test_values_are_those_of_stock(encoder, options, mode):
    model = load_model(encoder("modernbert"), **options).double()
    batch = batch_of(model)
    stock = [F.normalize(model(dict(column))["token_embeddings"], dim=-1) for column in batch]
    masks = extract_skiplist_mask(batch, model.skiplist)
    if not options:
        masks[0][:] = True
    pairs = [zip(rows, mask, strict=True) for rows, mask in zip(stock, masks, strict=True)]
    columns = [[rows[live] for rows, live in pair] for pair in pairs]
    documents = [text for row in zip(*columns[1:], strict=True) for text in row]
    for enabled in (False, True):
        if enabled:
            pylate_fastmaxsim.enable()
        found = encode(model, batch)
        for ours, theirs in zip(found, (columns[0], documents), strict=True):
            torch.testing.assert_close(tokens_of(ours), theirs, atol=1e-10, rtol=0)


def test_documents_of_one_column_are_those_of_their_queries(model):
    stock = run(losses.Distillation(model, normalize_scores=False), one_column(model), LABELS)

    class OfOwn(ByHand):
        def forward(self, sentence_features, labels):
            queries, documents = encode(self.model, sentence_features)
            # Stock lets masked tokens win, with the similarity 0.
            floor = torch.ones(len(documents), dtype=torch.bool)
            scores = maxsim(queries, documents, torch.arange(18).view(6, 3), zero_floor=floor)
            return F.kl_div(scores.log_softmax(1), labels.softmax(1), reduction="batchmean")

    assert_equal(run(OfOwn(model), one_column(model), LABELS), stock)


def matryoshka(make):
    return lambda model: Matryoshka(model, make(model), **VIEWS)


def by_tokens(model):
    return ContrastiveDistillation(model, **OPTIONS, mini_batch_tokens=70)


# Losses, and the calls that one of them makes with the flag.
PADDING_FREE = {
    "by hand": (ByHand, 1),
    "both": (lambda model: ContrastiveDistillation(model, **OPTIONS), 1),
    "both, by tokens": (by_tokens, None),
    "cut": (matryoshka(losses.Contrastive), 1),
    "cut, cached": (matryoshka(partial(losses.CachedContrastive, mini_batch_size=3)), None),
}


@pytest.mark.parametrize("make, calls", PADDING_FREE.values(), ids=PADDING_FREE.keys())
def test_texts_are_encoded_once_and_without_padding(wide, packed, make, calls):
    batch, loss = batch_of(wide, columns=3), make(wide)

    def tokens_of_calls() -> list[int]:
        return [call["input_ids"].numel() for call in calls_of(wide, lambda: loss(batch, LABELS))]

    padded = tokens_of_calls()
    assert calls is None or len(padded) == 4
    pylate_fastmaxsim.enable()
    loss(batch, LABELS)
    tokens = tokens_of_calls()
    assert sum(tokens) < 0.8 * sum(padded)
    assert calls is None or len(tokens) == calls
    if make is by_tokens:
        assert max(tokens + padded) <= 70 and len(tokens) > 1


def test_a_model_that_changes_its_masks_is_refused(model):
    def prune(_module, args):
        args[0]["attention_mask"][:, 2::3] = 0

    model.register_forward_pre_hook(prune)
    for enabled in (False, True):
        if enabled:
            pylate_fastmaxsim.enable()
        with pytest.raises(ValueError, match="which tokens are scored is read before it runs"):
            encode(model, batch_of(model))


@pytest.mark.parametrize("pooled", [False, True])
def test_tokens_that_are_left_out_of_full_documents_are_masked_ones(encoder, pooled):
    """In stock a document without padding has no similarity of 0, and one that was cut has."""
    model = load_model(encoder("bert"), document_length=6).double()
    loss = Matryoshka(model, losses.Contrastive(model), document_tokens=(2,), pooled=pooled)
    assert_as_stock(loss, batch_of(model))


@pytest.mark.parametrize(
    "metric, falls_back",
    [(lambda *args, **kwargs: ColBERTScores()(*args, **kwargs), True), (PooledScores(length_normalize=True), False)],
    ids=["own", "ours"],
)
def test_any_score_metric_inside(model, caplog, metric, falls_back):
    loss = Matryoshka(model, losses.Contrastive(model, score_metric=metric), **VIEWS)
    assert_as_stock(loss, batch_of(model), stock_masking=falls_back)
    assert ("padded implementation" in caplog.text) == falls_back
