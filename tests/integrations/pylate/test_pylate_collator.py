"""What the patched collator leaves with a batch is used where it fits the batch, and nowhere else."""

import torch
from pylate.utils import ColBERTCollator

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL
from tests.support.encoded import assert_encodes_as_stock, batch_of, encode, mode_of
from tests.support.models import sentences

ROWS = [{"query": "a sea", "document": text} for text in sentences(6, longest=30)]


def test_it_spares_the_encoder_the_search(model, packed, no_search):
    pylate_fastmaxsim.enable()
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
    assert f"document_{TOKEN_TOTAL}" in Configured(tokenize_fn=model.tokenize)(ROWS)
    made = Shortening(tokenize_fn=model.tokenize)(ROWS)
    columns = [{k.removeprefix(f"{n}_"): v for k, v in made.items() if k.startswith(n)} for n in ("query", "document")]
    assert not any(TOKEN_TOTAL in column for column in columns)
    assert_encodes_as_stock(model, columns)
    assert mode_of(model) == {mode}


def test_it_is_stock_where_padding_stays(model):
    collate = ColBERTCollator(tokenize_fn=model.tokenize)
    stock = collate(ROWS)
    with pylate_fastmaxsim.enabled(padding_free=False):
        assert collate(ROWS).keys() == stock.keys()
    with pylate_fastmaxsim.enabled():
        assert collate(ROWS).keys() - stock.keys() == {f"{column}_{TOKEN_TOTAL}" for column in ROWS[0]}


def test_in_workers(model):
    pylate_fastmaxsim.enable()
    encode(model, batch_of(model))
    collate = ColBERTCollator(tokenize_fn=model.tokenize)
    loader = torch.utils.data.DataLoader(
        ROWS, batch_size=3, num_workers=1, collate_fn=collate, multiprocessing_context="fork"
    )
    assert [f"document_{TOKEN_TOTAL}" in batch for batch in loader] == [True] * 2
