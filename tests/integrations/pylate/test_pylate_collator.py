"""What the patched collator leaves with a batch is used where it fits the batch, and nowhere else."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from encoded import assert_encodes_as_stock, batch_of, encode, mode_of
from models import sentences
from pylate.utils import ColBERTCollator

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL


def test_the_collator_spares_the_encoder_the_search(model, packed, no_search):
    pylate_fastmaxsim.enable()
    modes.mode_for(model, batch_of(model)[1:], None)
    batch = batch_of(model)
    assert_encodes_as_stock(model, batch)
    no_search()
    encode(model, batch)


def _collated_with(collator, model):
    texts = [sentences(6, longest=longest, seed=longest) for longest in (8, 30, 20)]
    names = ["query", "document_0", "document_1"]
    batch = collator([dict(zip(names, row, strict=True)) for row in zip(*texts, strict=True)])
    return [
        {key.removeprefix(f"{name}_"): value for key, value in batch.items() if key.startswith(name)} for name in names
    ]


def test_a_collator_with_a_call_of_its_own_may_change_masks(model, mode):
    class Shortening(ColBERTCollator):
        def __call__(self, features):
            batch = super().__call__(features)
            for name in ("document_0", "document_1"):
                batch[f"{name}_attention_mask"][:, 5:] = 0
            return batch

    pylate_fastmaxsim.enable()
    batch = _collated_with(Shortening(tokenize_fn=model.tokenize), model)
    assert not any(TOKEN_TOTAL in column for column in batch)
    assert_encodes_as_stock(model, batch)
    assert mode_of(model) == {mode}


def test_a_collator_that_is_only_configured_spares_the_search_too(model):
    class Configured(ColBERTCollator):
        pass

    pylate_fastmaxsim.enable()
    assert all(TOKEN_TOTAL in column for column in _collated_with(Configured(tokenize_fn=model.tokenize), model))


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
