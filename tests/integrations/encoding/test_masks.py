"""Models that change which tokens their texts have, as learned pruning does: their losses stay PyLate's own."""

from functools import partial

import pytest
import torch
from pylate import losses

import pylate_fastmaxsim
from tests.support.compared import assert_equal, batch_of, run
from tests.support.encoded import mode_of
from tests.support.models import Behind, collated, features, sentences


class Pruning(Behind):
    def change(self, features):
        features["attention_mask"] = features["attention_mask"] * (features["token_embeddings"][..., 0] > 0)
        return features


class PruningInTraining(Pruning):
    def change(self, features):
        return super().change(features) if self.training else features


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


def put_behind(kind, model):
    model[1] = kind(model[1])


def put_before(model):
    def mask(_module, args):
        args[0]["attention_mask"] = args[0]["attention_mask"].clone()
        args[0]["attention_mask"][:, 3::4] = 0

    model.register_forward_pre_hook(mask)


CONTRASTIVE, CACHED = losses.Contrastive, partial(losses.CachedContrastive, mini_batch_size=4)
KINDS = Pruning, PruningInTraining, Cutting, PruningInPlace
CHANGES = {kind.__name__: (partial(put_behind, kind), CONTRASTIVE) for kind in KINDS} | {
    "before": (put_before, CONTRASTIVE),
    "before, distillation": (put_before, losses.Distillation),
    "before, cached": (put_before, CACHED),
    "Pruning, distillation": (partial(put_behind, Pruning), losses.Distillation),
    "Pruning, cached": (partial(put_behind, Pruning), CACHED),
}


def lines(caplog) -> list[str]:
    return [message for message in caplog.messages if "is not accelerated" in message]


@pytest.mark.parametrize("collate", [collated, features])
@pytest.mark.parametrize("change, loss_class", CHANGES.values(), ids=CHANGES.keys())
def test_a_model_that_changes_masks(model, caplog, change, loss_class, collate):
    loss_function, labels = loss_class(model), torch.rand(6, 2, dtype=torch.float64)
    texts = [sentences(6, longest=8), sentences(12 if loss_class is losses.Distillation else 6, seed=1)]
    if loss_class is losses.Distillation:
        collate = features  # the collator takes lists
    plain = run(loss_function, features(model, *texts), labels)[0]
    change(model)
    stock = run(loss_function, features(model, *texts), labels)
    assert stock[0] != plain or loss_class is CACHED
    pylate_fastmaxsim.enable(stock_masking=True, padding_free=collate is collated)
    with torch.no_grad():
        loss_function(collate(model, *texts), labels)  # in training still, but without gradients
        model.eval()
        loss_function(collate(model, *texts), labels)  # says nothing of training, in which pruning is learned
    model.train()
    for _ in range(2):
        assert_equal(run(loss_function, collate(model, *texts), labels), stock)
    said = lines(caplog)
    assert len(said) == (loss_class is not CACHED)
    assert all(f"{type(loss_function).__name__} is not" in line for line in said)
    assert all("the model changes input_ids or attention_mask" in line for line in said)


@pytest.mark.parametrize("kind", [Answering, Detaching])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_what_changes_nothing_is_not_left_to_stock(model, mode, caplog, loss_class, kind):
    put_behind(kind, model)
    loss_function, batch = loss_class(model), batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True, padding_free="always")
    for _ in range(2):
        assert_equal(run(loss_function, batch), stock)
    assert not lines(caplog)
    assert mode_of(model) == {mode}


def test_a_change_that_begins_later_is_refused(model, mode):
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    pylate_fastmaxsim.enable()
    run(loss_function, batch)
    put_before(model)
    with pytest.raises(ValueError, match="changes input_ids or attention_mask now.* from the first batch on"):
        run(loss_function, batch)
