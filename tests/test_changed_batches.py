"""Losses of batches that somebody changed behind the collator, ours against stock."""

from __future__ import annotations

import pytest
import torch
from models import collated, load_model, sentences
from pylate import losses
from test_losses import assert_equal, batch_of, run

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import left_behind


def reordered(column, order):
    return {key: order(value) for key, value in column.items()}


CHANGES = {
    "rolled positives as negatives": lambda batch: [*batch[:2], reordered(batch[1], lambda value: value.roll(1, 0))],
    "positives from behind": lambda batch: [batch[0], reordered(batch[1], lambda value: value.flip(0))],
    # Where queries are packed with the documents they have an index of their own.
    "all from behind": lambda batch: [reordered(column, lambda value: value.flip(0)) for column in batch],
    # Somebody who moves a batch to a device may move only what they know.
    "an index elsewhere": lambda batch: [
        {key: value.to("meta") if key == "token_index" else value for key, value in column.items()} for column in batch
    ],
    "a shorter mask": lambda batch: [
        batch[0],
        {**batch[1], "attention_mask": batch[1]["attention_mask"] * (torch.arange(batch[1]["input_ids"].shape[1]) < 5)},
    ],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_rows_and_masks_that_are_no_longer_the_collators(encoder, mode, loss_class, change):
    model = load_model(encoder("bert")).double()
    loss_function = loss_class(model)
    stock = run(loss_function, change(batch_of(model, collate=collated)))
    pylate_fastmaxsim.enable(stock_masking=True)
    batch = batch_of(model, collate=collated)
    assert all("token_index" in column for column in batch)
    assert_equal(run(loss_function, change(batch)), stock)


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_a_list_of_negatives_in_one_column_is_refused(encoder, mode, loss_class):
    model = load_model(encoder("modernbert"))
    batch = collated(model, sentences(4, longest=8), sentences(4, seed=1))
    batch += collated(model, sentences(12, seed=2))
    pylate_fastmaxsim.enable()
    with pytest.raises(
        ValueError, match="all document columns must have as many texts as the first, got 4, 12; a list"
    ):
        loss_class(model)(batch, None)


@pytest.mark.parametrize("key", ["token_type_ids", "position_ids"])
def test_what_only_one_column_gives_the_encoder(encoder, mode, key):
    model = load_model(encoder("bert")).double()
    loss_function = losses.Contrastive(model)
    queries, positives, negatives = batch_of(model)
    counted = torch.arange(positives["input_ids"].shape[1]).flip(0).expand_as(positives["input_ids"])
    positives = {**positives, key: torch.ones_like(counted) if key == "token_type_ids" else counted}
    negatives = {name: value for name, value in negatives.items() if name != key}
    stock = run(loss_function, [queries, positives, negatives])
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, [queries, positives, negatives]), stock)


def test_a_device_is_asked_without_waiting_for_it(monkeypatch):
    events = []

    class Event:
        there = False

        def record(self, stream):
            events.append(self)

        def query(self):
            return self.there

    on_host = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **options: on_host(*args, **options))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    for fits in (True, False, True):
        left_behind._hear(torch.tensor(fits))
    events[0].there = True
    left_behind._hear(torch.tensor(True))
    events[1].there = True
    with pytest.raises(ValueError, match="reordered or masked after their collator"):
        left_behind._hear(torch.tensor(True))
    left_behind._hear(torch.tensor(True))
    left_behind.forget()


def test_a_mask_of_more_or_fewer_tokens_than_the_collator_left_does_not_fit():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    index, ends = torch.tensor([0, 1, 4, 5, 6]), torch.tensor([0, 2, 5])
    assert left_behind.fits(mask, index, ends)
    for row, token, attended in ((0, 2, 1), (1, 3, 1), (1, 2, 0)):
        changed = mask.clone()
        changed[row, token] = attended
        assert not left_behind.fits(changed, index, ends)
    # As many in all, in other rows.
    assert not left_behind.fits(torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]), index, ends)
