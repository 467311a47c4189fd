"""``encode`` for losses by hand: the values of the host, the same with the flag as without, and their gradients."""

from __future__ import annotations

import pytest
import torch
from pylate import losses
from pylate.losses.contrastive import extract_skiplist_mask
from torch import nn
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim import encode, maxsim
from tests.support.compared import assert_equal, batch_of, run
from tests.support.encoded import calls_of, tokens_of
from tests.support.examples import example
from tests.support.models import collated, features, load_model, sentences


class ByHand(nn.Module):
    """Contrastive, and distillation of the teacher's scores for a query's own documents."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features, labels):
        queries, documents = encode(self.model, sentence_features)
        scores, own = maxsim(queries, documents), torch.arange(len(documents)).view(len(queries), -1)
        contrastive = F.cross_entropy(scores, own[:, 0])
        return contrastive + F.kl_div(scores.gather(1, own).log_softmax(1), labels.softmax(1), reduction="batchmean")


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


def test_a_loss_by_hand_is_padding_free_and_equal(encoder, packed):
    # Its local layers see all of a query, so that queries are encoded with packed documents.
    model = load_model(encoder("modernbert", local_attention=24)).double()
    batch = batch_of(model, columns=3)
    labels = torch.rand(6, 3, dtype=torch.float64)
    by_hand = ByHand(model)
    padded = run(by_hand, batch, labels)
    assert len(calls_of(model, lambda: by_hand(batch, labels))) == 4
    pylate_fastmaxsim.enable()
    assert_equal(run(by_hand, batch, labels), padded)
    (call,) = calls_of(model, lambda: by_hand(batch, labels))
    attended = sum(int(column["attention_mask"].sum()) for column in batch[1:])
    assert call["input_ids"].shape == (1, attended + batch[0]["input_ids"].numel())


def test_documents_of_one_column_are_those_of_their_queries(model):
    texts = sentences(12, seed=1)
    batch = features(model, sentences(4, longest=8), texts)
    labels = torch.rand(4, 3, dtype=torch.float64)
    stock = run(losses.Distillation(model, normalize_scores=False), batch, labels)

    class OfOwn(ByHand):
        def forward(self, sentence_features, labels):
            queries, documents = encode(self.model, sentence_features)
            # Stock lets masked tokens win, with the similarity 0.
            floor = torch.ones(len(documents), dtype=torch.bool)
            scores = maxsim(queries, documents, torch.arange(12).view(4, 3), zero_floor=floor)
            return F.kl_div(scores.log_softmax(1), labels.softmax(1), reduction="batchmean")

    assert_equal(run(OfOwn(model), batch, labels), stock)


def test_the_loss_of_the_docs(model, mode):
    names: dict = {}
    exec(example("loss-by-hand"), names)
    batch, labels = batch_of(model, columns=3), torch.rand(6, 3, dtype=torch.float64)
    stock = run(ByHand(model), batch, labels)
    pylate_fastmaxsim.enable()
    assert_equal(run(names["ContrastiveAndDistillation"](model), batch, labels), stock)


def test_the_collators_counts_are_used(model, packed, no_search):
    pylate_fastmaxsim.enable()
    batch = batch_of(model, collate=collated)
    encode(model, batch)  # decides how to encode
    no_search()
    encode(model, batch)


def test_what_cannot_be_encoded_is_said_in_a_sentence(model):
    batch = batch_of(model)
    with pytest.raises(ValueError, match="got columns of 6, 5"):
        encode(model, [batch[0], {key: value[:5] for key, value in batch[1].items()}])
    with pytest.raises(ValueError, match="got columns of 6"):
        encode(model, batch[:1])
    with pytest.raises(TypeError, match="a ColBERT of PyLate or a MultiVectorEncoder.*got Linear"):
        encode(nn.Linear(1, 1), batch)

    def prune(_module, args):
        args[0]["attention_mask"][:, 2::3] = 0

    model.register_forward_pre_hook(prune)
    for enabled in (False, True):
        if enabled:
            pylate_fastmaxsim.enable()
        with pytest.raises(ValueError, match="which tokens are scored is read before it runs"):
            encode(model, batch_of(model))
