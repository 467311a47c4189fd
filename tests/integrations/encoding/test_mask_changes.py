"""Models that change which tokens their texts have, as learned pruning does: their losses stay PyLate's own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pylate import losses

import pylate_fastmaxsim
from tests.support.compared import assert_equal, batch_of, mode_of, run
from tests.support.models import Behind, collated, features, sentences


class Pruning(Behind):
    def change(self, features):
        features["attention_mask"] = features["attention_mask"] * (features["token_embeddings"][..., 0] > 0)
        return features


class Cutting(Behind):
    def change(self, features):
        for key in ("token_embeddings", "attention_mask", "input_ids"):
            features[key] = features[key][:, :8]
        return features


class PruningInPlace(Behind):
    def change(self, features):
        features["attention_mask"][:, 3::4] = 0
        return features


class Answering(Behind):
    """Its mask is seen by the caller of the model only, which is not a loss."""

    def change(self, features):
        return {**features, "attention_mask": features["attention_mask"] * 0}


class Detaching(Behind):
    """The same memory in another tensor, as the hooks of DeepSpeed's ZeRO 3 leave it."""

    def change(self, features):
        for key in ("attention_mask", "input_ids"):
            features[key] = features[key].detach()
        return features


def behind(kind):
    def change(model):
        model[1] = kind(model[1])

    return change


def before(model):
    def mask(_module, args):
        args[0]["attention_mask"] = args[0]["attention_mask"].clone()
        args[0]["attention_mask"][:, 3::4] = 0

    model.register_forward_pre_hook(mask)


CHANGES = {
    "pruned": behind(Pruning),
    "cut": behind(Cutting),
    "masked before": before,
    "pruned in place": behind(PruningInPlace),
}


def copied(batch):
    return [{key: value.clone() for key, value in column.items()} for column in batch]


def lines(caplog) -> list[str]:
    return [message for message in caplog.messages if "is not accelerated" in message]


@pytest.mark.parametrize("collate", [collated, features])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_contrastive(model, caplog, change, collate):
    loss_function = losses.Contrastive(model)
    batches = [batch_of(model, seed=seed, collate=features) for seed in (0, 10)]
    plain = [run(loss_function, copied(batch))[0] for batch in batches]
    change(model)
    stock = [run(loss_function, copied(batch)) for batch in batches]
    assert all(changed[0] != unchanged for changed, unchanged in zip(stock, plain, strict=True))
    pylate_fastmaxsim.enable(stock_masking=True, padding_free=collate is collated)
    for seed, expected in zip((0, 10), stock, strict=True):
        assert_equal(run(loss_function, batch_of(model, seed=seed, collate=collate)), expected)
    (said,) = lines(caplog)
    assert "Contrastive is not" in said and "the model changes input_ids or attention_mask" in said


@pytest.mark.parametrize("change", [CHANGES["pruned"], before])
@pytest.mark.parametrize(
    ("loss_class", "documents"),
    [(losses.Distillation, 12), (partial(losses.CachedContrastive, mini_batch_size=4), 6)],
)
def test_other_losses(model, caplog, change, loss_class, documents):
    loss_function = loss_class(model)
    labels = torch.rand(6, 2, dtype=torch.float64)
    batch = features(model, sentences(6, longest=8), sentences(documents, seed=1))
    change(model)
    stock = run(loss_function, copied(batch), labels)
    pylate_fastmaxsim.enable(stock_masking=True)
    for _ in range(2):
        assert_equal(run(loss_function, copied(batch), labels), stock)
    assert len(lines(caplog)) == (loss_class is losses.Distillation)


@pytest.mark.parametrize("kind", [Answering, Detaching])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_what_changes_nothing_is_not_left_to_stock(model, mode, caplog, loss_class, kind):
    behind(kind)(model)
    loss_function, batch = loss_class(model), batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True, padding_free="always")
    for _ in range(2):
        assert_equal(run(loss_function, batch), stock)
    assert not lines(caplog)
    assert mode_of(model) == mode


def test_a_change_that_begins_later_is_refused(model, mode):
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    pylate_fastmaxsim.enable()
    run(loss_function, batch)
    before(model)
    with pytest.raises(ValueError, match="changes input_ids or attention_mask now.* from the first batch on"):
        run(loss_function, batch)


def test_evaluation_says_nothing_of_training(model, mode, caplog):
    """Pruning is learned in training only."""

    class InTraining(Pruning):
        def change(self, features):
            return super().change(features) if self.training else features

    behind(InTraining)(model)
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    stock = run(loss_function, copied(batch))
    pylate_fastmaxsim.enable(stock_masking=True)
    with torch.no_grad():
        loss_function(copied(batch))  # in training still, but without gradients
        model.eval()
        loss_function(copied(batch))
    model.train()
    assert_equal(run(loss_function, copied(batch)), stock)
