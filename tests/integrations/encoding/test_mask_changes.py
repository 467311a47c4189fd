"""Models that change which tokens their texts have, as learned pruning does: their losses stay PyLate's own."""

from __future__ import annotations

import pytest
import torch
from compared import assert_equal, batch_of, mode_of, run
from models import Behind, collated, features, sentences
from pylate import losses

import pylate_fastmaxsim


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


class Cloning(Behind):
    def change(self, features):
        features["attention_mask"] = features["attention_mask"].clone()
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


@pytest.mark.parametrize(("collate", "padding_free"), [(collated, True), (features, False)])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_contrastive(model, caplog, change, collate, padding_free):
    loss_function = losses.Contrastive(model)
    batches = [batch_of(model, seed=seed, collate=features) for seed in (0, 10)]
    plain = [run(loss_function, copied(batch))[0] for batch in batches]
    change(model)
    stock = [run(loss_function, copied(batch)) for batch in batches]
    assert all(changed[0] != unchanged for changed, unchanged in zip(stock, plain, strict=True))
    pylate_fastmaxsim.enable(stock_masking=True, padding_free=padding_free)
    for seed, expected in zip((0, 10), stock, strict=True):
        assert_equal(run(loss_function, batch_of(model, seed=seed, collate=collate)), expected)
    (said,) = lines(caplog)
    assert "Contrastive is not" in said and "the model changes input_ids or attention_mask" in said


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_distillation(model, caplog, change):
    loss_function = losses.Distillation(model, normalize_scores=False)
    batch = features(model, sentences(4, longest=8), sentences(12, seed=1))
    labels = torch.rand(4, 3, dtype=torch.float64)
    change(model)
    stock = run(loss_function, copied(batch), labels)
    pylate_fastmaxsim.enable(stock_masking=True)
    for _ in range(2):
        assert_equal(run(loss_function, copied(batch), labels), stock)
    (said,) = lines(caplog)
    assert "Distillation is not" in said


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_cached_contrastive_where_stock_can(model, change):
    loss_function = losses.CachedContrastive(model, mini_batch_size=4)
    change(model)
    try:
        stock = run(loss_function, copied(batch_of(model)))
    except RuntimeError:
        pytest.skip("stock takes the masks from before, which do not fit")
    pylate_fastmaxsim.enable(stock_masking=True)
    for _ in range(2):
        assert_equal(run(loss_function, copied(batch_of(model))), stock)


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


def test_an_equal_mask_in_the_place_of_the_one_given(model, mode, caplog):
    """It is left to stock: to compare would wait for the device, and ranks might find different things."""
    behind(Cloning)(model)
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    for _ in range(2):
        assert_equal(run(loss_function, batch), stock)
    assert len(lines(caplog)) == 1


def test_it_is_looked_at_anew_when_switched_on_again(model, mode, caplog):
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    dense = model[1]
    behind(Pruning)(model)
    with pylate_fastmaxsim.enabled():
        run(loss_function, batch)
    model[1] = dense
    with pylate_fastmaxsim.enabled():
        run(loss_function, batch)
        assert mode_of(model) == mode
    assert len(lines(caplog)) == 1


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
