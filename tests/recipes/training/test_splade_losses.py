"""The losses, columns, prompts and learning rates of a SPLADE that a recipe trains; see test_kinds.py for whole trainings."""

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import losses

from pylate_fastmaxsim.recipes.config.kinds import RegularizersSection, SpladeLoss
from pylate_fastmaxsim.recipes.kinds.splade import KIND
from pylate_fastmaxsim.recipes.models.load import kind_of, load_model
from pylate_fastmaxsim.recipes.training.arguments import training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data
from tests.support.saved_models import SPARSE
from tests.support.tiny_recipe import text

PAIR = {"query": text(0, 4), "positive": text(0, 9)}


@pytest.fixture
def model(saved) -> SparseEncoder:
    return SparseEncoder(saved(SPARSE), device="cpu").eval()


COLUMNS = [[text(row + column, 3 + column) for row in range(4)] for column in range(3)]


def loss_of(section: SpladeLoss, model: SparseEncoder, labels: torch.Tensor | None = None) -> dict:
    return KIND.build_loss(section, model)(list(map(model.tokenize, COLUMNS)), labels)


def test_losses_are_those_that_the_recipe_names(model):
    query, *documents = (model.encode(column).to_dense() for column in COLUMNS)
    live = torch.cat(documents)
    threshold = int((live != 0).sum(1).median())
    many = (live != 0).sum(1) > threshold
    assert 0 < many.sum() < 8
    weights = RegularizersSection(document_weight=0.3, query_weight=0.2, query="l1", document_threshold=threshold)
    contrastive = SpladeLoss(temperature=0.5, regularizers=weights)
    target = torch.nn.functional.cross_entropy(query @ torch.cat(documents).T / 0.5, torch.arange(4))
    expected = {
        "base_loss": target,
        "document_regularizer_loss": 0.3 * ((live * many[:, None]).mean(0) ** 2).sum(),
        "query_regularizer_loss": 0.2 * query.sum(1).mean(),
    }
    torch.testing.assert_close(loss_of(contrastive, model), expected)
    cached = SpladeLoss("cached_contrastive", temperature=0.5, mini_batch_size=3, regularizers=weights)
    assert isinstance(KIND.build_loss(cached, model), losses.CachedSpladeLoss)
    torch.testing.assert_close(loss_of(cached, model), expected)

    teacher = torch.tensor([[1.0, 3.0], [2.0, 2.5], [0.5, 0.0], [4.0, 1.0]])
    scores = torch.stack([(query * each).sum(1) for each in documents], dim=1)
    weights = RegularizersSection(document_weight=0.3)
    divergence = (teacher.softmax(1) * (teacher.log_softmax(1) - scores.log_softmax(1))).sum(1).mean()
    margins = ((scores[:, 0] - scores[:, 1] - teacher[:, 0] + teacher[:, 1]) ** 2).mean()
    for objective, base in {None: divergence, "margin_mse": margins}.items():
        temperature = 1.0 if objective is None else None
        section = SpladeLoss("distillation", temperature=temperature, objective=objective, regularizers=weights)
        found = loss_of(section, model, teacher)
        torch.testing.assert_close(found.pop("base_loss"), base)
        assert list(found) == ["document_regularizer_loss"]


@pytest.fixture
def trainer_of(recipe_of, saved):
    """``trainer_of(row, overrides)``: the trainer of a recipe whose data is this row."""

    def make(row: dict, overrides: str = "", name: str = saved(SPARSE)):
        overrides = f"model.build=null model.name_or_path={name} evaluation.rows=0 {overrides}".strip()
        recipe = recipe_of("splade", f"{overrides} training.dataloader_drop_last=false", rows=[row])
        kind = kind_of(recipe.model)
        arguments = training_arguments(recipe, kind)
        model = load_model(recipe.model, arguments.device, recipe.training.seed)
        return kind.build_trainer(recipe.loss, model, load_data(recipe).train, arguments)

    return make


def test_documents_of_a_list_are_columns_and_go_their_route(trainer_of):
    row = {"query": "late query", "documents": ["a", "b", "c"], "scores": [0.2, 2.0, 1.0]}
    trainer = trainer_of(row, "loss.name=distillation model.inference_free=true")
    features, labels = trainer.collect_features(next(iter(trainer.get_train_dataloader())))
    assert [each["task"] for each in features] == ["query", *["document"] * 3]
    assert [trainer.model.tokenizer.decode(each["input_ids"][0][-2:-1]) for each in features[1:]] == ["a", "b", "c"]
    assert labels.tolist() == [pytest.approx(row["scores"])]


def test_prompts_of_a_model_are_those_of_its_training(model, trainer_of, tmp_path):
    model.prompts = {"query": "rivers carry ", "document": "bees tell "}
    model.save_pretrained(str(tmp_path / "model"))
    trainer = trainer_of({"query": "late", "positive": "fused"}, name=str(tmp_path / "model"))
    features, _ = trainer.collect_features(next(iter(trainer.get_train_dataloader())))
    expected = [trainer.model.tokenize([words])["input_ids"] for words in ("rivers carry late", "bees tell fused")]
    assert all(torch.equal(each["input_ids"], ids) for each, ids in zip(features, expected, strict=True))


def test_weights_of_queries_have_their_learning_rate(trainer_of):
    trainer = trainer_of(PAIR, "model.inference_free=true training.query_learning_rate=0.5")
    trainer.create_optimizer()
    (weight,) = trainer.model[0].sub_modules["query"].parameters()
    rates = {id(each): group["lr"] for group in trainer.optimizer.param_groups for each in group["params"]}
    assert rates.pop(id(weight)) == 0.5 and set(rates.values()) == {1e-3}
    assert len(rates) == len(list(trainer.model.parameters())) - 1


def test_weights_follow_the_schedule_of_the_recipe(trainer_of):
    weights = "loss.regularizers={query_weight: 0.01, document_weight: 0.02, schedule: linear, warmup_ratio: 0.5}"
    trainer = trainer_of(PAIR, f"{weights} training.max_steps=8 training.save_steps=null")
    seen, track = [], trainer.track_loss_components

    def tracked(loss):
        seen.append(trainer.loss.document_regularizer_weight)
        track(loss)

    trainer.track_loss_components = tracked
    trainer.train()
    assert seen == pytest.approx([0, 0.005, 0.01, 0.015, *[0.02] * 4])
