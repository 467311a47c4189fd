"""A SPLADE trained by a recipe: the losses of Sentence Transformers, the same stock and fast, and what a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import losses

from pylate_fastmaxsim.comparison.turns import Turns
from pylate_fastmaxsim.integrations.sparse_encoder import encoder as sparse_encoder
from pylate_fastmaxsim.recipes.comparison import compare as comparing
from pylate_fastmaxsim.recipes.comparison.measure import measure
from pylate_fastmaxsim.recipes.config.kinds import RegularizersSection, SpladeLoss
from pylate_fastmaxsim.recipes.kinds.splade import KIND
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of, load_model
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.arguments import training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data
from tests.support.comparisons import Page, RecordingGate, run_of
from tests.support.paths import RECIPES
from tests.support.recipe_runs import command, interrupt, same_model
from tests.support.sparse_encoders import build_sparse_encoder
from tests.support.splade_recipe import splade_over, tiny_splade
from tests.support.tiny_recipe import hub_dataset, kd_subsets, text, write

WEIGHTS = {"query_weight": 0.01, "document_weight": 0.02}
KD = {"documents": ["a", "b", "c"], "scores": [0.2, 2.0, 1.0]}


@pytest.fixture(scope="module")
def saved(encoder, tmp_path_factory) -> str:
    return build_sparse_encoder(tmp_path_factory.mktemp("sparse"), encoder("bert"))


@pytest.fixture
def model(saved) -> SparseEncoder:
    return SparseEncoder(saved, device="cpu").eval()


def loss_of(section: SpladeLoss, model: SparseEncoder, labels: torch.Tensor | None = None, columns: int = 3) -> dict:
    texts = [[text(row + column, 3 + column) for row in range(4)] for column in range(columns)]
    return KIND.build_loss(section, model)([model.tokenize(column) for column in texts], labels)


def vectors_of(model: SparseEncoder, columns: int = 3) -> list[torch.Tensor]:
    return [model.encode([text(row + column, 3 + column) for row in range(4)]).to_dense() for column in range(columns)]


def test_losses_are_those_that_the_recipe_names(model):
    query, *documents = vectors_of(model)
    live = torch.cat(documents)
    nonzeros = (live != 0).sum(1)
    threshold = int(nonzeros.median())
    many = nonzeros > threshold
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


def trainer_of(tmp_path: Path, saved: str, row: dict, **sections):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    sections["data"] = {"files": [str(tmp_path / "rows.jsonl")]}
    recipe = load_recipe(
        write(tmp_path, splade_over(tmp_path, saved, **sections)),
        ["evaluation.rows=0", "training.dataloader_drop_last=false"],
    )
    kind = kind_of(recipe.model)
    arguments = training_arguments(recipe, kind)
    model = load_model(recipe.model, arguments.device, recipe.training.seed)
    return kind.build_trainer(recipe.loss, model, load_data(recipe).train, arguments)


def test_documents_of_a_list_are_columns_and_go_their_route(saved, tmp_path):
    sections = {"loss": {"name": "distillation"}, "model": {"inference_free": True}}
    trainer = trainer_of(tmp_path, saved, {"query": "late query", **KD}, **sections)
    features, labels = trainer.collect_features(next(iter(trainer.get_train_dataloader())))
    assert [each["task"] for each in features] == ["query", *["document"] * 3]
    assert [trainer.model.tokenizer.decode(each["input_ids"][0][-2:-1]) for each in features[1:]] == ["a", "b", "c"]
    assert labels.tolist() == [pytest.approx(KD["scores"])]


def test_prompts_of_a_model_are_those_of_its_training(saved, tmp_path):
    model = SparseEncoder(saved, device="cpu")
    model.prompts = {"query": "rivers carry ", "document": "bees tell "}
    model.save_pretrained(str(tmp_path / "model"))
    row = {"query": "late", "positive": "fused"}
    trainer = trainer_of(tmp_path, str(tmp_path / "model"), row)
    features, _ = trainer.collect_features(next(iter(trainer.get_train_dataloader())))
    expected = [trainer.model.tokenize([words])["input_ids"] for words in ("rivers carry late", "bees tell fused")]
    assert all(torch.equal(each["input_ids"], ids) for each, ids in zip(features, expected, strict=True))


def test_weights_of_queries_have_their_learning_rate(saved, tmp_path):
    sections = {"model": {"inference_free": True}, "training": {"query_learning_rate": 0.5}}
    trainer = trainer_of(tmp_path, saved, {"query": text(0, 4), "positive": text(0, 9)}, **sections)
    trainer.create_optimizer()
    (weight,) = trainer.model[0].sub_modules["query"].parameters()
    rates = {id(each): group["lr"] for group in trainer.optimizer.param_groups for each in group["params"]}
    assert rates.pop(id(weight)) == 0.5 and set(rates.values()) == {1e-3}
    assert len(rates) == len(list(trainer.model.parameters())) - 1


def test_weights_follow_the_schedule_of_the_recipe(saved, tmp_path):
    schedule = {"schedule": "linear", "warmup_ratio": 0.5}
    row = {"query": text(0, 4), "positive": text(0, 9)}
    trainer = trainer_of(
        tmp_path,
        saved,
        row,
        loss={"regularizers": WEIGHTS | schedule},
        training={"max_steps": 8, "per_device_train_batch_size": 1, "save_steps": None},
    )
    seen, track = [], trainer.track_loss_components

    def tracked(loss):
        seen.append(trainer.loss.document_regularizer_weight)
        track(loss)

    trainer.track_loss_components = tracked
    trainer.train()
    assert seen == pytest.approx([0, 0.005, 0.01, 0.015, *[0.02] * 4])


@pytest.mark.e2e
def test_stock_and_fast_training_agree_for_every_loss(saved, tmp_path):
    rows = [
        {"query": text(i, 4), "documents": [text(i + j, 3 + (i * j) % 11) for j in range(3)], "scores": [2.0, 1.0, 0.5]}
        for i in range(16)
    ]
    (tmp_path / "kd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = {
        "contrastive": ({}, {}, "pairs.jsonl"),
        "cached": ({"name": "cached_contrastive", "mini_batch_size": 3}, {}, "pairs.jsonl"),
        "static": ({"name": "cached_contrastive", "mini_batch_size": 3}, {"inference_free": True}, "pairs.jsonl"),
        "divergence": ({"name": "distillation"}, {}, "kd.jsonl"),
        "margins": ({"name": "distillation", "objective": "margin_mse", "mini_batch_size": 2}, {}, "kd.jsonl"),
    }
    found = {}
    for name, (loss, keys, file) in cases.items():
        sections = {"loss": loss, "model": keys, "data": {"files": [str(tmp_path / file)]}}
        sections["model"]["config_kwargs"] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        recipe = splade_over(tmp_path, saved, output=name, **sections)
        recipe["training"] |= {"max_steps": 3, "save_steps": None, "seed": 1}
        recipe["evaluation"]["rows"] = 4
        path = write(tmp_path, recipe)
        stock, fast = (training.train(load_recipe(path, [f"fast.enabled={on}"])) for on in ("false", "true"))
        found[name], other = ([loss for _, loss in result["losses"]] for result in (stock, fast))
        assert len(found[name]) == 3 and other == pytest.approx(found[name], rel=1e-4), name
        for metric in ("ndcg@10", "flops", "query_nonzeros", "document_nonzeros"):
            assert fast[metric] == pytest.approx(stock[metric], rel=1e-3), (name, metric)
    assert found["cached"] == pytest.approx(found["contrastive"], rel=1e-4)
    assert len({losses[0] for losses in found.values()}) == 4


@pytest.mark.e2e
def test_an_interrupted_run_goes_on_and_the_model_is_one_of_sentence_transformers(tmp_path, monkeypatch):
    path = write(tmp_path, tiny_splade(tmp_path, training={"max_steps": 8}))
    training.train(load_recipe(path))
    parted = load_recipe(path, [f"output_dir={tmp_path / 'parted'}"])
    assert interrupt(parted, monkeypatch, 5) == "checkpoint-6"
    result = training.train(parted)
    assert result["resumed_from"] == "checkpoint-6" and same_model(tmp_path / "out", tmp_path / "parted")
    model = SparseEncoder(str(tmp_path / "out/model"), device="cpu")
    assert model.encode(["late interaction"]).shape == (1, model[0].auto_model.config.vocab_size)
    card = (tmp_path / "out/model/README.md").read_text()
    assert "SpladeLoss" in card and "(sentence-transformers " in card and "kind: splade" in card
    # A finished run that is run again evaluates the checkpoint, and says the same of its training.
    again = training.train(parted)
    assert {name: again[name] for name in ("losses", "ndcg@10", "flops")} == {
        name: result[name] for name in ("losses", "ndcg@10", "flops")
    }
    assert "SpladeLoss" in (tmp_path / "parted/model/README.md").read_text()


@pytest.mark.e2e
def test_a_comparison_shows_sparsity_beside_quality(saved, tmp_path, monkeypatch):
    def run_here(recipe_file, logs, options):
        runs = {}
        for mode, keywords in options.items():
            gate = RecordingGate()
            recipe = load_recipe(recipe_file, [f"fast.enabled={mode == 'fast'}"])
            result = measure(recipe, gate, **keywords)
            runs[mode] = run_of(gate.steps, memory={"before": 1, "peak": 2}, result=result)
        return Turns(runs, restarted=False)

    # Processes of their own would cost half a minute.
    monkeypatch.setattr(comparing, "_run", run_here)
    # Tiny batches on a CPU would be left to stock.
    monkeypatch.setattr(sparse_encoder, "FEW_TOKENS", 0)
    recipe = splade_over(tmp_path, saved, training={"max_steps": 4}, evaluation={"rows": 8})
    recipe["model"]["config_kwargs"] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    done = command("compare", write(tmp_path, recipe))
    assert done.exit_code == 0, done.output
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    stock, fast = comparison["runs"]["stock"], comparison["runs"]["fast"]
    for run in (stock, fast):
        assert run["status"] == "finished" and run["steps"] == 4 and 0 <= run["padding"] < 1
        assert 0 < run["flops"] < run["document_nonzeros"] and run["query_nonzeros"] > 0
        assert all(seconds > 0 for seconds in run["phases"].values())
    # What is measured is what trains: measuring does not keep the encoder from leaving padding out.
    # Beside Sentence Transformers 6 a PyLate that cannot be imported stands in for none.
    assert not [line for run in (stock, fast) for line in run["warnings"] if "PyLate is not" not in line]
    assert stock["padding"] > 5 * fast["padding"] >= 0 and comparison["summary"]["largest_loss_difference"] < 1e-4
    assert fast["untrained"]["flops"] > 0
    assert (
        "FLOPS" in done.stdout and "Non-zeros of a query" in Page((tmp_path / "out" / "compare.html").read_text()).text
    )


@pytest.mark.e2e
def test_the_shipped_recipe_trains_on_stand_ins(saved, tmp_path):
    triplets = [{"query": text(i, 5), "positive": text(i, 9), "negative": text(i + 1, 30)} for i in range(40)]
    overrides = [f"model.name_or_path={saved.removesuffix('model')}mlm", "evaluation.rows=8", "training.max_steps=2"]
    overrides += ["training.use_cpu=true", "training.dataloader_num_workers=0", "training.report_to=none"]
    overrides += ["training.logging_steps=1"]
    mined = hub_dataset(tmp_path / "kd", **kd_subsets())
    distillation = [f"data={{source: distillation, name: {mined}, n_ways: 4}}"]
    distillation += ["loss.name=distillation", "loss.objective=kl_divergence"]
    for name, own in {
        "contrastive": [f"data.name={hub_dataset(tmp_path / 'data', triplet=triplets)}"],
        "distillation": distillation,
    }.items():
        recipe = load_recipe(RECIPES / "splade.yaml", [*overrides, *own, f"output_dir={tmp_path / name}"])
        result = training.train(recipe)
        assert len(result["losses"]) == 2 and 0 <= result["ndcg@10"] <= 1 and result["flops"] > 0
        assert {"contrastive": "accuracy", "distillation": "kl_divergence"}[name] in result
