"""A training logs its gradient concentration, and is otherwise the same."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from pylate import losses, utils
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch.nn import functional as F
from transformers import TrainerCallback

from pylate_fastmaxsim import PooledScores, Softmax, TokenBatch, TopK, pooled_scores
from pylate_fastmaxsim.diagnostics.gradient_concentration import gradient_concentration
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of
from pylate_fastmaxsim.recipes.trainers.gradients import LogGradientConcentration
from pylate_fastmaxsim.recipes.training import train as training
from tests.support.examples import example
from tests.support.models import load_model
from tests.support.recipe_runs import same_model
from tests.support.tiny_recipe import hub_dataset, kd_subsets, text, tiny, write

PREFIX = "gradient_concentration/"


class Logged(TrainerCallback):
    """What reporting tools see."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


def test_a_recipe_logs_it_and_trains_the_same_model(tmp_path, monkeypatch):
    logged, run = Logged(), training._run_trainer

    def observed(recipe, kind, trainer, checkpoint):
        trainer.add_callback(logged)
        return run(recipe, kind, trainer, checkpoint)

    monkeypatch.setattr(training, "_run_trainer", observed)

    def recipe(name, **keys):
        return load_recipe(write(tmp_path, tiny(tmp_path, name, training={"max_steps": 4, "save_steps": None, **keys})))

    plain = training.train(recipe("plain"))
    assert not any(key.startswith(PREFIX) for _, logs in logged.logs for key in logs)
    logged.logs.clear()
    result = training.train(recipe("logged", log_gradient_concentration=2))
    rows = [(step, logs) for step, logs in logged.logs if any(key.startswith(PREFIX) for key in logs)]
    assert [step for step, _ in rows] == [0, 2, 4]
    for _, logs in rows:
        assert 0 < logs[PREFIX + "score_gini"] < 1 and logs[PREFIX + "score_documents"] == 32
        assert 0 < logs[PREFIX + "loss_winning_share"] <= 1
    # All losses are logged as without it.
    assert result["losses"] == plain["losses"] and len(plain["losses"]) == 4
    assert same_model(tmp_path / "plain", tmp_path / "logged")


def test_the_script_of_the_docs_logs_what_the_function_measures(encoder, tmp_path):
    model = load_model(encoder("modernbert"))
    rows = {"query": [text(i, 4) for i in range(8)], "positive": [f"{text(i, 9)} {i}" for i in range(8)]}
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=8, report_to=[], use_cpu=True,
            save_strategy="no", learning_rate=0.0,
        ),
        train_dataset=Dataset.from_dict(rows),
        loss=losses.Contrastive(model=model),
        data_collator=utils.ColBERTCollator(tokenize_fn=model.tokenize),
    )  # fmt: skip

    exec(example("gradient-concentration"), {})
    names = {"model": model, "trainer": trainer, "queries": rows["query"], "positives": rows["positive"]}
    changed = {"every=100": "every=1", "=Max()": "=Softmax(0.1)", "=0.05": "=0.5"}
    callback = example("log-gradient-concentration", changed)
    exec(callback, names | {"Softmax": Softmax})
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if PREFIX + "loss_gini" in entry]
    assert [entry["step"] for entry in logs] == [0, 1]

    queries, documents = (
        TokenBatch.from_list(model.encode(rows[column], is_query=column == "query", convert_to_tensor=True))
        for column in rows
    )
    positives = torch.arange(8)[:, None]
    of_score = gradient_concentration(queries, documents, positives, pooling=Softmax(0.1))
    scores = pooled_scores(queries, documents, pooling=Softmax(0.1)).requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(scores / 0.5, positives[:, 0]), scores)
    of_loss = gradient_concentration(queries, documents, pooling=Softmax(0.1), loss_gradient=gradient)
    for figures in map(asdict, (of_score, of_loss)):
        of = figures.pop("of")
        assert {name: logs[0][f"{PREFIX}{of}_{name}"] for name in figures} == pytest.approx(figures, rel=1e-4)


def test_of_a_distillation_it_is_of_scores_only(tmp_path):
    data = {"source": "distillation", "name": str(hub_dataset(tmp_path / "kd", **kd_subsets())), "files": None}
    keys = {"max_steps": 1, "save_steps": 1, "log_gradient_concentration": 1}
    recipe = tiny(tmp_path, data=data, loss={"name": "distillation"}, training=keys, evaluation={"rows": 0})
    training.train(load_recipe(write(tmp_path, recipe)))
    history = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    names = {name for entry in history for name in entry if name.startswith(PREFIX)}
    assert PREFIX + "score_gini" in names and not any("loss" in name for name in names)


def test_the_pooling_is_that_of_the_loss_at_this_step(tmp_path):
    loss = SimpleNamespace(score_metric=PooledScores(TopK(8)))
    trainer = SimpleNamespace(train_dataset=Dataset.from_dict({"query": ["a"], "positive": ["b"]}), loss=loss)
    file = write(tmp_path, tiny(tmp_path, training={"log_gradient_concentration": 5}))
    batches = [TokenBatch.from_list([torch.randn(9, 4) for _ in range(3)]) for _ in range(2)]

    def figures(*overrides):
        recipe = load_recipe(file, overrides)
        return kind_of(recipe.model).gradient_logger(recipe, trainer)._figures(*batches)

    of_pooling = [figures("loss.pooling.top_k=2")]
    loss.score_metric.pooling = TopK(1)
    of_pooling.append(figures("loss.pooling.top_k=2"))
    assert of_pooling[0] != of_pooling[1] == figures()


def test_of_a_sharded_model_it_is_refused(tmp_path):
    callback = LogGradientConcentration(SimpleNamespace(is_fsdp_enabled=True), None, 1)
    with pytest.raises(RecipeError, match="^Gradient concentration is not logged under FSDP and DeepSpeed"):
        callback.on_train_begin(None, None, None)
