"""What the patched collator leaves with a batch is used where it fits the batch, and nowhere else."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from pylate.utils import ColBERTCollator

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL
from tests.support.encoded import assert_encodes_as_stock, batch_of, encode, mode_of
from tests.support.models import sentences


def test_the_collator_spares_the_encoder_the_search(model, packed, no_search):
    pylate_fastmaxsim.enable()
    modes.mode_for(model, batch_of(model)[1:], None)
    batch = batch_of(model)
    assert_encodes_as_stock(model, batch)
    no_search()
    encode(model, batch)


class Shortening(ColBERTCollator):
    def __call__(self, features):
        batch = super().__call__(features)
        batch["document_attention_mask"][:, 5:] = 0
        return batch


class Configured(ColBERTCollator):
    pass


def test_a_collator_with_a_call_of_its_own_may_change_masks(model, mode):
    pylate_fastmaxsim.enable()
    rows = [{"query": "a sea", "document": text} for text in sentences(6, longest=30)]
    assert f"document_{TOKEN_TOTAL}" in Configured(tokenize_fn=model.tokenize)(rows)
    made = Shortening(tokenize_fn=model.tokenize)(rows)
    columns = [{k.removeprefix(f"{n}_"): v for k, v in made.items() if k.startswith(n)} for n in ("query", "document")]
    assert not any(TOKEN_TOTAL in column for column in columns)
    assert_encodes_as_stock(model, columns)
    assert mode_of(model) == {mode}


def test_the_collator_is_stock_where_padding_stays(model):
    rows = [{"query": "a sea", "document": "sand"}]
    stock = ColBERTCollator(tokenize_fn=model.tokenize)(rows)
    with pylate_fastmaxsim.enabled(padding_free=False):
        assert ColBERTCollator(tokenize_fn=model.tokenize)(rows).keys() == stock.keys()
    with pylate_fastmaxsim.enabled():
        added = ColBERTCollator(tokenize_fn=model.tokenize)(rows).keys() - stock.keys()
    assert added == {f"{column}_{TOKEN_TOTAL}" for column in ("query", "document")}


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.process)])
def test_collator_in_workers(method, model):
    pylate_fastmaxsim.enable()
    encode(model, batch_of(model))
    rows = [{"query": "a", "document": "b"}] * 4
    loader = torch.utils.data.DataLoader(
        rows,
        batch_size=2,
        num_workers=1,
        collate_fn=ColBERTCollator(tokenize_fn=model.tokenize),
        multiprocessing_context=multiprocessing.get_context(method),
    )
    keys = [set(batch) for batch in loader]
    assert len(keys) == 2
    # A spawned worker imports PyLate as it came; the encoder then searches for itself.
    assert all((f"document_{TOKEN_TOTAL}" in batch) == (method == "fork") for batch in keys)
