"""ContrastiveDistillation and Matryoshka of a MultiVectorEncoder, against Sentence Transformers' own losses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
from sentence_transformers.multi_vector_encoder import losses
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import LossColumns
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka
from tests.support.compared import assert_equal
from tests.support.multi_vector import LOSSES as OF_HOST
from tests.support.multi_vector import NEGATIVES, POSITIVES, QUERIES, TEACHER, batch_of, load, modes, run
from tests.support.multi_vector import assert_equal as assert_nearly_equal

OPTIONS = {"contrastive_weight": 0.7, "distillation_weight": 3.0, "temperature": 0.5, "teacher_temperature": 0.25}
SIZES = [{}, {"mini_batch_size": 3}, {"mini_batch_tokens": 60}]
KEYS = "input_ids", "attention_mask", "token_type_ids"
VIEWS = {"dims": (128, 24), "weights": (1.0, 0.5), "document_tokens": (None, 3), "token_weights": (2.0, 1.0)}


@pytest.fixture
def joined(monkeypatch) -> list[None]:
    """An entry for each time that queries and documents shared a call."""
    made, keep = [], LossColumns.keep
    monkeypatch.setattr(LossColumns, "keep", lambda *args: made.append(None) or keep(*args))
    return made


class OfHost(nn.Module):
    """Both losses of Sentence Transformers, each of which encodes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.contrastive = losses.MultiVectorMultipleNegativesRankingLoss(model, scale=2.0)
        self.distillation = losses.MultiVectorDistillKLDivLoss(model, student_temperature=0.5, teacher_temperature=0.25)

    def forward(self, sentence_features, labels):
        distillation = self.distillation(sentence_features, labels)  # times the square of its student temperature
        return 0.7 * self.contrastive(sentence_features) + 3.0 / 0.25 * distillation


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_contrastive_distillation(encoder, mode, size, joined):
    model = load(encoder("bert"))
    stock = run(model, OfHost(model))
    loss = ContrastiveDistillation(model, **OPTIONS, **size)
    without = run(model, loss)
    assert_nearly_equal(without, stock)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss), without)
    assert modes(model) == {mode} and len(joined) == (mode == "packed" and not size)
    with torch.no_grad():
        torch.testing.assert_close(loss(batch_of(model), TEACHER).double(), without[0])


def test_dropout_is_that_of_the_first_pass(encoder, packed):
    model = load(encoder("bert", hidden_dropout_prob=0.3))
    pylate_fastmaxsim.enable()
    run(model, loss := ContrastiveDistillation(model, mini_batch_size=3))
    made = []
    model.register_forward_hook(lambda _module, _args, output: made.append(output["token_embeddings"].detach()))
    run(model, loss)
    half = len(made) // 2
    assert half > 3
    assert all(torch.equal(*pair) for pair in zip(made[:half], made[half:], strict=True))


class Sum(nn.Module):
    """Matryoshka by Sentence Transformers alone: each view is encoded anew, by a model that cuts what it returns."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, sentence_features, labels):
        total = 0.0
        for dim, weight in ((128, 1.0), (24, 0.5)):
            for tokens, of_tokens in ((None, 2.0), (3, 1.0)):
                hook = self.loss.model.register_forward_hook(partial(self.cut, dim, tokens), with_kwargs=True)
                total = total + weight * of_tokens * self.loss([dict(each) for each in sentence_features], labels)
                hook.remove()
        return total

    @staticmethod
    def cut(dim, tokens, _model, _args, given, output):
        embeddings, mask = output["token_embeddings"][..., :dim], output["attention_mask"].bool()
        if tokens is not None and given["task"] == "document":
            mask = mask & (mask.cumsum(1) <= tokens)
        return {**output, "token_embeddings": nn.functional.normalize(embeddings, dim=-1), "attention_mask": mask}


@pytest.mark.parametrize("loss_class, options", OF_HOST[:4] + OF_HOST[6:8])
def test_matryoshka_is_the_sum_over_models_that_are_cut(encoder, mode, loss_class, options, joined):
    model = load(encoder("bert"))
    stock = run(model, Sum(loss_class(model, **options)))
    loss = Matryoshka(model, loss_class(model, **options), **VIEWS)
    assert_nearly_equal(run(model, loss), stock)
    pylate_fastmaxsim.enable()
    assert_nearly_equal(run(model, loss), stock)
    assert len(joined) == (mode == "packed")


@pytest.mark.parametrize("loss_class, options", OF_HOST[4:6])
def test_gradcache_inside_of_matryoshka(encoder, mode, loss_class, options):
    model = load(encoder("bert"))
    whole = losses.MultiVectorMultipleNegativesRankingLoss(model)
    whole = run(model, Matryoshka(model, whole, **VIEWS, pooled=True))
    loss = Matryoshka(model, loss_class(model, **options), **VIEWS, pooled=True)
    assert_nearly_equal(run(model, loss), whole)
    pylate_fastmaxsim.enable()
    assert_nearly_equal(run(model, loss), whole)
    assert "calculate_loss" not in vars(loss.loss) and loss.uses_gradient_cache


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pooled", [False, True])
def test_contrastive_distillation_inside_of_matryoshka(encoder, packed, size, pooled):
    model = load(encoder("bert"))
    whole = run(model, Matryoshka(model, ContrastiveDistillation(model), **VIEWS, pooled=pooled))
    pylate_fastmaxsim.enable()
    loss = Matryoshka(model, ContrastiveDistillation(model, **size), **VIEWS, pooled=pooled)
    assert_equal(run(model, loss), whole)


class OwnForward(ContrastiveDistillation):
    def forward(self, sentence_features, labels):
        return super().forward(sentence_features, labels)


class Around(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.inner = loss.model, loss

    def forward(self, sentence_features, labels):
        return self.inner(sentence_features, labels)


class OfSlices(nn.Module):
    """Calls its model with parts of a column."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features, labels):
        parts = [{key: value[:2] for key, value in column.items() if key in KEYS} for column in sentence_features]
        return sum(self.model(part)["token_embeddings"].sum() for part in parts)


@pytest.mark.parametrize("on", [False, True])
def test_losses_that_cannot_be_cut_are_refused(encoder, packed, on):
    model = load(encoder("bert"))
    if on:
        pylate_fastmaxsim.enable()
    cached = losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=3)
    inside = [Matryoshka(model, cached, (128, 24)), Around(cached), OwnForward(model, mini_batch_size=3)]
    inside.append(Matryoshka(model, ContrastiveDistillation(model, mini_batch_size=3), (128, 24)))
    for loss in inside:
        with pytest.raises(ValueError, match="GradCache inside of it"):
            run(model, Matryoshka(model, loss, document_tokens=(None, 3)))
    with pytest.raises(ValueError, match="once with the column of queries"):
        run(model, Matryoshka(model, OfSlices(model), document_tokens=(None, 3)))


@pytest.mark.parametrize("on", [False, True])
def test_one_inside_of_another_is_the_sum_over_both(encoder, packed, on):
    model = load(encoder("bert"))
    loss = ContrastiveDistillation(model)
    whole = run(model, Matryoshka(model, loss, **VIEWS))
    if on:
        pylate_fastmaxsim.enable()
    inner = Matryoshka(model, loss, VIEWS["dims"], VIEWS["weights"])
    assert_equal(run(model, Matryoshka(model, inner, document_tokens=(None, 3), token_weights=(2.0, 1.0))), whole)


def test_settings_for_a_model_card(encoder):
    model = load(encoder("bert"))
    both = ContrastiveDistillation(model, mini_batch_tokens=60)
    assert both.get_config_dict() == {
        "contrastive_weight": 1.0,
        "distillation_weight": 1.0,
        "temperature": 1.0,
        "teacher_temperature": 1.0,
        "mini_batch_size": None,
        "mini_batch_tokens": 60,
        "gather_across_devices": False,
    }
    config = Matryoshka(model, both, (64, 32)).get_config_dict()
    assert config["loss"] == "ContrastiveDistillation" and config["dims"] == (64, 32)


@pytest.mark.e2e
def test_the_trainer(encoder, packed, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"query": QUERIES, "positive": POSITIVES, "negative": NEGATIVES, "label": TEACHER.tolist()}

    def curve() -> list[float]:
        torch.manual_seed(0)
        model = MultiVectorEncoder(encoder("bert"), device="cpu")
        loss = ContrastiveDistillation(model, temperature=0.5, mini_batch_tokens=60)
        loss = Matryoshka(model, loss, (128, 32), document_tokens=(None, 4), pooled=True)
        options = {"per_device_train_batch_size": 4, "max_steps": 4, "logging_steps": 1, "report_to": "none"}
        arguments = MultiVectorEncoderTrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, **options)
        data = datasets.Dataset.from_dict(rows)
        trainer = MultiVectorEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stock = curve()
    assert "document_tokens" in (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    pylate_fastmaxsim.enable()
    assert curve() == pytest.approx(stock, rel=1e-4)
