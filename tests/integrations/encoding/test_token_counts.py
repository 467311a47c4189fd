"""Counts of tokens go with the rows of their column, and are used where they fit its mask."""

import pickle
from copy import deepcopy

import pytest
import torch
from accelerate.utils import operations
from pylate import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding.batch import attended_index
from pylate_fastmaxsim.integrations.encoding.token_counts import TokenCounts, known_total
from tests.support.compared import assert_equal, batch_of, run
from tests.support.models import collated, load_model

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
COLUMN = {"input_ids": MASK, "attention_mask": MASK, "token_total": TokenCounts.of(MASK)}


def each(change):
    return lambda column: {key: change(value) for key, value in column.items()}


ROWS = {
    "slice": each(lambda value: value[1:3]),
    "index": each(lambda value: value[torch.tensor([2, 2, 0])]),
    "roll": each(lambda value: value.roll(1, 0)),
    "split": each(lambda value: value.split(3)[0]),
    "repeat": each(lambda value: value.repeat_interleave(2, 0)),
    "stack of rows": each(lambda value: torch.stack(list(value[:2]))),
    "cat": each(lambda value: torch.cat([value, value[:1]])),
    "trim of padding": each(lambda value: value[[1, 3]][:, :3]),
    "pin and move": each(lambda value: value.to("cpu", non_blocking=True).contiguous()),
    "deepcopy": deepcopy,
    "pickle": lambda column: pickle.loads(pickle.dumps(column)),
    "accelerate.send_to_device": lambda column: operations.send_to_device(column, torch.device("cpu")),
    "accelerate.slice_tensors": lambda column: operations.slice_tensors(column, slice(1, 4)),
    "accelerate.concatenate": lambda column: operations.concatenate([column, column]),
}


@pytest.mark.parametrize("change", ROWS.values(), ids=ROWS.keys())
def test_counts_go_with_the_rows_of_their_column(change):
    column = change(COLUMN)
    assert isinstance(column["token_total"], TokenCounts)
    assert known_total(column) == column["attention_mask"].sum()


OTHERWISE = {
    "other rows": {"attention_mask": MASK[:2], "input_ids": MASK[:2]},
    "narrower": {"attention_mask": MASK[:, :2], "input_ids": MASK[:, :2]},
    "everything wider": {key: torch.nn.functional.pad(value, (0, 1)) for key, value in COLUMN.items()},
    "another mask": {"attention_mask": MASK * torch.tensor([1, 1, 0])},
    # As many in all, or one more or fewer.
    "a gap": {"attention_mask": torch.tensor([[1, 0, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]])},
    "one more": {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]])},
    "one fewer": {"attention_mask": torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])},
    # accelerate makes these on all ranks but the first where it dispatches batches.
    "accelerate's own tensors": operations.initialize_tensors(operations.get_data_structure(COLUMN)),
}


@pytest.mark.parametrize("change", OTHERWISE.values(), ids=OTHERWISE.keys())
def test_counts_that_do_not_fit_are_not_used(change):
    assert known_total(COLUMN | change) is None


def rolled_positives_as_negatives(batch):
    return [*batch[:2], each(lambda value: value.roll(1, 0))(batch[1])]


def shorter_mask(batch):
    mask = batch[1]["attention_mask"]
    return [batch[0], {**batch[1], "attention_mask": mask * (torch.arange(mask.shape[1]) < 5)}]


def with_key(key):
    def change(batch):
        queries, positives, negatives = batch
        values = torch.ones_like(positives["input_ids"])
        if key == "position_ids":
            values = torch.arange(values.shape[1]).flip(0).expand_as(values)
        return [queries, {**positives, key: values}, {name: value for name, value in negatives.items() if name != key}]

    return change


CHANGES = [rolled_positives_as_negatives, shorter_mask, with_key("token_type_ids"), with_key("position_ids")]


@pytest.mark.parametrize("change", CHANGES)
def test_losses_of_batches_that_are_changed(encoder, mode, change):
    model = load_model(encoder("bert")).double()
    loss_function = losses.Contrastive(model)
    stock = run(loss_function, change(batch_of(model, collate=collated)))
    pylate_fastmaxsim.enable(stock_masking=True)
    batch = batch_of(model, collate=collated)
    assert all("token_total" in column for column in batch)
    assert_equal(run(loss_function, change(batch)), stock)


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
