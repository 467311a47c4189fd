"""What a training logs of its gradient concentration; test_kinds.py has whole trainings."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from pylate import losses, utils
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch.nn import functional as F

from pylate_fastmaxsim import Softmax, TokenBatch, pooled_scores
from pylate_fastmaxsim.diagnostics.gradient_concentration import gradient_concentration
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.trainers.gradients import LogGradientConcentration
from tests.support.examples import example
from tests.support.models import load_model
from tests.support.tiny_recipe import text

PREFIX = "gradient_concentration/"


def test_the_script_of_the_docs_logs_what_the_function_measures(encoder, tmp_path):
    model = load_model(encoder("modernbert"))
    rows = {"query": [text(i, 4) for i in range(8)], "positive": [f"{text(i, 9)} {i}" for i in range(8)]}
    options = {"max_steps": 1, "per_device_train_batch_size": 8, "report_to": [], "save_strategy": "no"}
    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(str(tmp_path), use_cpu=True, learning_rate=0.0, **options),
        Dataset.from_dict(rows),
        loss=losses.Contrastive(model=model),
        data_collator=utils.ColBERTCollator(tokenize_fn=model.tokenize),
    )
    exec(example("gradient-concentration"), {})
    changed = {"every=100": "every=1", "=Max()": "=Softmax(0.1)", "=0.05": "=0.5"}
    exec(example("log-gradient-concentration", changed), names := {"Softmax": Softmax})
    names["log_gradients"](trainer, model, rows["query"], rows["positive"])
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
        of, _ = figures.pop("of"), figures.pop("ginis")
        assert {name: logs[0][f"{PREFIX}{of}_{name}"] for name in figures} == pytest.approx(figures, rel=1e-4)


def test_of_a_sharded_model_it_is_refused(tmp_path):
    callback = LogGradientConcentration(SimpleNamespace(is_fsdp_enabled=True), None, 1)
    with pytest.raises(RecipeError, match="^Gradient concentration is not logged under FSDP and DeepSpeed"):
        callback.on_train_begin(None, None, None)
