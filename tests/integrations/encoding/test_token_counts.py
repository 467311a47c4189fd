"""Losses of batches that somebody changed behind the collator, ours against stock."""

from __future__ import annotations

import pytest
import torch
from models import collated, load_model, sentences
from pylate import losses
from test_pylate_losses import assert_equal, batch_of, run

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import token_counts
from pylate_fastmaxsim.integrations.encoding.batch import attended_index


def reordered(column, order):
    return {key: order(value) for key, value in column.items()}


CHANGES = {
    "rolled positives as negatives": lambda batch: [*batch[:2], reordered(batch[1], lambda value: value.roll(1, 0))],
    "positives from behind": lambda batch: [batch[0], reordered(batch[1], lambda value: value.flip(0))],
    "all from behind": lambda batch: [reordered(column, lambda value: value.flip(0)) for column in batch],
    # Somebody who moves a batch to a device may move only what they know.
    "a total elsewhere": lambda batch: [
        {key: value.to("meta") if key == "token_total" else value for key, value in column.items()} for column in batch
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
    assert all("token_total" in column for column in batch)
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
        token_counts._poll(torch.tensor(fits))
    events[0].there = True
    token_counts._poll(torch.tensor(True))
    events[1].there = True
    with pytest.raises(ValueError, match="changed after their collator"):
        token_counts._poll(torch.tensor(True))
    token_counts._poll(torch.tensor(True))
    token_counts.reset()


def test_a_mask_of_more_or_fewer_tokens_than_the_collator_left_does_not_fit():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    assert token_counts.matches(mask, 5)
    for row, token, attended in ((0, 2, 1), (1, 3, 1), (1, 2, 0)):
        changed = mask.clone()
        changed[row, token] = attended
        assert not token_counts.matches(changed, 5)
    # As many in all, with a gap between them.
    assert not token_counts.matches(torch.tensor([[1, 1, 0, 0], [1, 1, 0, 1]]), 5)


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (40, 33)])
def test_tokens_are_found_as_well_where_their_number_is_known(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    for one in (mask, torch.zeros_like(mask), torch.ones_like(mask)):
        searched, total = attended_index(one), int(one.sum())
        assert all(map(torch.equal, attended_index(one, total), searched))
        # A number that does not fit reads and writes nothing beside the batch, until the device says that it does not.
        for wrong in {max(total - 3, 0), total + 3}:
            index, ends = attended_index(one, wrong)
            assert len(index) == wrong and ((index >= 0) & (index < one.numel())).all()
            assert ends.shape == (len(one) + 1,) and (ends.diff() >= 0).all() and ends[-1] <= wrong


PARTS = {
    # As GradCache's own package does.
    "split": lambda column: zip(*(value.split(2) for value in column.values()), strict=False),
    "chunk": lambda column: zip(*(value.chunk(3) for value in column.values()), strict=False),
    "index": lambda column: ([value[rows] for value in column.values()] for rows in ([0, 2], [1], [5, 3, 4])),
    "mask": lambda column: ([value[torch.arange(6) % 3 == part] for value in column.values()] for part in range(3)),
}


@pytest.mark.parametrize("divide", PARTS.values(), ids=PARTS.keys())
def test_rows_of_everything_in_a_column_are_divided(encoder, mode, divide):
    model = load_model(encoder("modernbert")).double()
    loss_function = losses.Contrastive(model)

    def run_parts():
        batch = batch_of(model, collate=collated)
        columns = [[dict(zip(column, part, strict=True)) for part in divide(column)] for column in batch]
        return [run(loss_function, list(part)) for part in zip(*columns, strict=True)]

    stock = run_parts()
    assert len(stock) == 3
    pylate_fastmaxsim.enable(stock_masking=True)
    assert "token_total" in batch_of(model, collate=collated)[1]
    ours = run_parts()
    assert len(ours) == 3
    for our, expected in zip(ours, stock, strict=True):
        assert_equal(our, expected)
