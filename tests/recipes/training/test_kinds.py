"""What holds for recipes of every kind of model, end to end, whatever host trains it."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from pylate_fastmaxsim.recipes.comparison import compare as comparing
from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate
from pylate_fastmaxsim.recipes.load import dump_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of, load_model, load_trained
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.training.arguments import training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.case_tables import cases
from tests.support.comparisons import Page, take_turns_here
from tests.support.page_recipes import PAGES
from tests.support.recipe_kinds import LATE, MARKED, TRAINED
from tests.support.recipe_runs import command, interrupt, same_model
from tests.support.tiny_recipe import fell_back, list_rows, text

ROWS = {"pairs": None, "lists": list_rows()}
ROWS["triplets"] = [{"query": text(i, 4), "positive": text(i, 9), "negative": text(i + 3, 12)} for i in range(40)]
RANKED = [[text(i + j, 3 + i * j % 11) for j in range(3)] for i in range(40)]
ROWS["graded"] = [{"query": text(i, 4), "documents": RANKED[i], "scores": [3.0, 1.0, i / 20]} for i in range(40)]
# kind | loss | the loss that it is equal to, if any | rows | overrides
LOSSES = """
colbert | contrastive | - | pairs | loss.temperature=0.5 fast.stock_masking=true
colbert | cached | contrastive | pairs | loss.temperature=0.5 loss.name=cached_contrastive loss.mini_batch_size=2
  fast.stock_masking=true
colbert | divergence | - | graded | loss.name=distillation loss.normalize_scores=false fast.stock_masking=true
colbert | pooled | - | pairs | loss.pooling={top_k: 1, start: 4, schedule: linear}
colbert | pooled cached | - | pairs | loss.name=cached_contrastive loss.pooling.top_k=3
colbert | clusters | - | pairs | loss.name=cached_contrastive loss.pool_factors=[1,2]
colbert | pooled divergence | - | graded | loss.name=distillation loss.pooling.softmax=0.1
colbert | streamed | - | lists | data.streaming=true data.negatives_per_query=2 model.build=null fast.stock_masking=true
multi_vector | contrastive | - | triplets | loss.temperature=0.5
multi_vector | texts | contrastive | triplets | loss.temperature=0.5 loss.name=cached_contrastive loss.mini_batch_size=3
multi_vector | tokens | - | triplets | loss.name=cached_contrastive loss.mini_batch_num_tokens=40
  loss.score_mini_batch_size=3
multi_vector | checkpointed | tokens | triplets | loss.name=cached_contrastive loss.mini_batch_num_tokens=40
  training.gradient_checkpointing=true
multi_vector | divergence | - | graded | loss.name=distillation loss.temperature=0.5
multi_vector | margins | - | graded | loss.name=distillation loss.objective=margin_mse
multi_vector | pooled | - | triplets | loss.pooling={top_k: 1, start: 4, schedule: linear}
multi_vector | clusters | - | triplets | loss.pool_factors=[1,2] loss.pool_weights=[1,.5]
multi_vector | pooled divergence | - | graded | loss.name=distillation loss.pooling.softmax=0.1
multi_vector | streamed | - | lists | data.streaming=true data.negatives_per_query=2 model.build=null
splade | contrastive | - | pairs | training.seed=1
splade | cached | contrastive | pairs | training.seed=1 loss.name=cached_contrastive loss.mini_batch_size=3
splade | static | - | pairs | loss.name=cached_contrastive loss.mini_batch_size=3 model.inference_free=true
splade | divergence | - | graded | loss.name=distillation
splade | margins | - | graded | loss.name=distillation loss.objective=margin_mse loss.mini_batch_size=2
splade | streamed | - | lists | data.streaming=true data.negatives_per_query=2 model.build=null
colqwen2 | colbert | - | pairs | loss.temperature=0.02
colqwen2 | warm | - | pairs | loss.temperature=0.5
colqwen2 | negatives | - | pairs | data.columns=[query, image, negatives]
  loss={name: colbert_negative_ce, temperature: 0.5, in_batch_term_weight: 0.3}
colpali | colbert | - | pairs | training.gradient_checkpointing=false
colpali | checkpointed | colbert | pairs | training.gradient_checkpointing=true
"""
# Without dropout both ways draw the same random numbers.
ALIKE = "training.max_steps=4 training.save_steps=null training.eval_on_start=false"
ALIKE_TEXTS = f"{ALIKE} evaluation.rows=8 model.build.dropout=0 "
STREAMED = f"{ALIKE} evaluation.rows=0 model.config_kwargs={{dropout: 0.0, attention_dropout: 0.0}} model.name_or_path="


def losses(result: dict) -> list[float]:
    return [loss for _, loss in result["losses"]]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", TRAINED)
def test_stock_and_fast_train_alike_by_every_loss(kind, recipe_of, encoder, monkeypatch, caplog):
    scored = []
    if kind in PAGES:
        from pylate_fastmaxsim.integrations.colpali import losses as hooked

        operator = hooked.pooled_scores
        monkeypatch.setattr(hooked, "pooled_scores", lambda *args, **more: scored.append(0) or operator(*args, **more))
    found, twins = {}, []
    for _, name, twin, rows, overrides in (case for case in cases(LOSSES) if case[0] == kind):
        common = ALIKE if kind in PAGES else ALIKE_TEXTS
        if name == "streamed":
            common = STREAMED + encoder("distilbert", masked_lm=True)
        given = f"{common} {overrides} fast.enabled=".replace("  ", " ")
        stock = train(recipe_of(kind, f"{given}false", f"{name}-stock", ROWS[rows]))
        assert not scored
        fast = train(recipe_of(kind, f"{given}true", f"{name}-fast", ROWS[rows]))
        found[name] = losses(stock)
        assert len(found[name]) == 4 and losses(fast) == pytest.approx(found[name], rel=1e-4), name
        assert fast["fast"]["enabled"] and not any(map(fell_back, caplog.messages)), name
        for metric in {"flops", "query_nonzeros", "document_nonzeros"} & stock.keys():
            assert fast[metric] == pytest.approx(stock[metric], rel=1e-3), (name, metric)
        # Near ties in rankings of such a model may fall either way.
        assert name == "streamed" or 0 <= fast["ndcg@10"] <= 1
        assert len(scored) >= 4 * (kind in PAGES)
        scored.clear()
        if twin != "-":
            twins.append(name)
            assert found[name] == pytest.approx(found[twin], rel=1e-4), (name, twin)
    assert len({each[0] for name, each in found.items() if name not in twins}) == len(found) - len(twins)


class Reported(TrainerCallback):
    """Stands where TensorBoard's callback would, and keeps what it is told of the pooling in each step."""

    told: list[tuple[int, float]] = []

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" in logs:
            self.told.append((state.global_step, logs.get("pooling_temperature")))


CARDS = {
    "colbert": ["(PyLate ", "takes the maximum: Softmax(temperature=0.7) to Softmax(temperature=0.05) (linear over"],
    "multi_vector": ["(Sentence Transformers 6", "kind: multi_vector", "Training Logs", "(temperature=0.7) to Softmax"],
    "splade": ["(Sentence Transformers ", "kind: splade", "SpladeLoss", "Training Logs"],
    "colqwen2": ["(colpali-engine 0.3.", "colqwen_vidore", "library_name: colpali", "- pylate-fastmaxsim"],
}


@pytest.mark.parametrize("kind", [each for each in MARKED if each.values[0] in CARDS])
def test_an_interrupted_run_goes_on_and_ends_as_an_uninterrupted_one(kind, recipe_of, tmp_path, monkeypatch):
    # The interruption falls into the second epoch, between two checkpoints.
    overrides, steps, step, left = "", 14, 10, ["checkpoint-12", "checkpoint-14"]
    if kind in PAGES:
        overrides, steps, step, left = "model.lora=null", 4, 2, ["checkpoint-4"]
    elif kind == LATE:
        overrides = "loss.pooling={softmax: 0.05, start: 0.7, schedule: linear}"
    monkeypatch.setattr(Reported, "told", [])
    monkeypatch.setattr("transformers.trainer.get_reporting_integration_callbacks", lambda names: [Reported])
    whole = train(recipe_of(kind, overrides, "whole"))
    told = [(step, pytest.approx(0.75 - 0.05 * step) if kind == LATE else None) for step in range(1, steps + 1)]
    assert Reported.told == told
    assert interrupt(recipe_of(kind, overrides, "parts"), step) == f"checkpoint-{step + 1}"
    assert not (tmp_path / "parts" / "train.json").exists()
    (tmp_path / "parts").rename(tmp_path / "moved")
    moved = recipe_of(kind, overrides, "moved")
    parts = train(moved)
    assert parts["resumed_from"] == f"checkpoint-{step + 1}" and len(whole["losses"]) == steps
    assert parts["losses"] == whole["losses"] and Reported.told == [*told, *told]
    assert parts["ndcg@10"] == whole["ndcg@10"] and same_model(tmp_path / "whole", tmp_path / "moved")
    assert sorted(path.name for path in (tmp_path / "moved").glob("checkpoint-*")) == left
    card = tmp_path / "moved" / "model" / "README.md"
    assert all(said in card.read_text() for said in CARDS[kind]) and card.read_text().count("## Training recipe") == 1
    # A run that is over is evaluated once more, and says the same of its training.
    again = train(moved)
    untimed = {"seconds": None, "rows_per_second": None}
    assert again == parts | untimed | {"resumed_from": left[-1], "ndcg@10": pytest.approx(parts["ndcg@10"])}
    assert all(said in card.read_text() for said in CARDS[kind]) and card.read_text().count("## Training recipe") == 1


# Encodes with the host alone by the model in ``folder``, and its ``base`` where it has adapters.
HOSTS = {
    "colbert": """from pylate.models import ColBERT
print(ColBERT(folder, device="cpu").encode(["a query"], is_query=True)[0].shape)""",
    "multi_vector": """from sentence_transformers import MultiVectorEncoder
print(MultiVectorEncoder(folder, device="cpu").encode_query("a query").shape)""",
    "splade": """from sentence_transformers import SparseEncoder
print(SparseEncoder(folder, device="cpu").encode("a query").shape)""",
    "colqwen2": """from colpali_engine.models import ColQwen2, ColQwen2Processor
from peft import PeftModel
model = PeftModel.from_pretrained(ColQwen2.from_pretrained(base), folder)
print(model(**ColQwen2Processor.from_pretrained(folder).process_queries(["a query"]))[0].shape)""",
    "colpali": """from colpali_engine.models import ColPali, ColPaliProcessor
batch = ColPaliProcessor.from_pretrained(folder).process_queries(["a query"])
print(ColPali.from_pretrained(folder).eval()(**batch, token_type_ids=0 * batch["input_ids"])[0].shape)""",
}
ALONE = """import sys
sys.modules["pylate_fastmaxsim"] = None  # importing it fails
base, *folders = sys.argv[1:]
for folder in folders:"""


@pytest.mark.process
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("kind", TRAINED)
def test_saved_models_load_without_this_package_and_are_those_that_were_evaluated(kind, recipe_of, tmp_path):
    recipe = recipe_of(kind, "fast.enabled=true training.max_steps=4" + " model.lora=null" * (kind == "colpali"))
    result, prepared = train(recipe), prepare(recipe)
    folders = [result["model"]] if kind in PAGES else [result["model"], str(tmp_path / "out" / "checkpoint-4")]
    program = ALONE + f"\n{HOSTS[kind]}".replace("\n", "\n    ")
    command = [sys.executable, "-c", program, prepared.model.name_or_path, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(folders)
    trained = [load_trained(prepared.model, Path(folder), "cpu") for folder in folders]
    untrained = load_model(prepared.model, "cpu", recipe.training.seed)
    vectors = [retriever_of(model).encode(["a query"], 4, is_query=True) for model in (*trained, untrained)]
    found, *same, before = (each.weights if kind == "splade" else each.values for each in vectors)
    assert all(torch.equal(found, each) for each in same)
    assert before.shape != found.shape or not torch.allclose(before, found, atol=1e-3)
    assert evaluate(prepared, trained[0], load_data(prepared))["ndcg@10"] == result["ndcg@10"]
    for folder in folders:
        assert kind in PAGES or "## Training recipe" in Path(folder, "README.md").read_text()
        assert not any("fastmaxsim" in file.read_text() for file in Path(folder).rglob("*.json"))


def logged_gradients(recipe_of, tmp_path: Path, kind: str, overrides: str, rows: str = "pairs") -> list[dict]:
    """What is logged of gradients by a training that is the same without it."""
    overrides = f"training.max_steps=4 training.save_steps=2 {overrides}"
    plain = train(recipe_of(kind, overrides, "plain", ROWS[rows]))
    result = train(recipe_of(kind, f"{overrides} training.log_gradient_concentration=2", "logged", ROWS[rows]))
    assert result["losses"] == plain["losses"] and len(losses(plain)) == 4
    files = [tmp_path / name / "checkpoint-4" / "trainer_state.json" for name in ("plain", "logged")]
    before, after = (json.loads(file.read_text())["log_history"] for file in files)
    assert not any("gradient_concentration" in name for entry in before for name in entry)
    logged = [entry for entry in after if "gradient_concentration/score_gini" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    for entry in logged:
        assert 0 < entry["gradient_concentration/score_gini"] < 1
        assert entry["gradient_concentration/score_documents"] == (8 if kind in PAGES else 32)
    return logged


LOGGED = (
    "loss={name: cached_contrastive, pooling: {top_k: 1, start: 6, schedule: linear}, pool_factors: [2]}",
    "loss.name=distillation evaluation.rows=0",
)


@pytest.mark.parametrize(("overrides", "rows"), zip(LOGGED, ("pairs", "graded"), strict=True))
def test_gradient_concentration_is_logged_and_changes_nothing(overrides, rows, recipe_of, tmp_path):
    # Of a distillation it is of scores only.
    logged = logged_gradients(recipe_of, tmp_path, LATE, f"training.learning_rate=0 {overrides}", rows)
    for entry in logged:
        assert any("loss" in name for name in entry) == (rows == "pairs")
    # The weights stay; where the pooling has a schedule, what is logged follows it.
    distinct = {entry["gradient_concentration/score_gini"] for entry in logged}
    assert len(distinct) == (3 if "schedule" in overrides else 1)


@pytest.mark.e2e
@pytest.mark.skipif(not PAGES, reason="needs colpali-engine")
def test_gradients_of_pages_are_those_of_the_pooling_of_the_loss(recipe_of, tmp_path):
    gini = []
    for loss in ("loss.name=colbert", "loss={name: colbert, use_smooth_max: true, tau: 0.2}"):
        logged = logged_gradients(recipe_of, tmp_path, "colqwen2", loss)
        for name in ("plain", "logged"):
            shutil.rmtree(tmp_path / name)
        gini.append(logged[0]["gradient_concentration/score_gini"])
        assert not any("loss_gini" in name for entry in logged for name in entry)
    assert gini[0] > gini[1]


# kind | overrides | how much of what stock encodes is padding
COMPARED = """
colbert | loss.pooling={softmax: 0.05, start: 1.0, schedule: cosine} | 5
colbert | loss.name=cached_contrastive loss.mini_batch_size=2 fast.stock_masking=true | 3
multi_vector | loss.temperature=0.5 | 2
splade | training.max_steps=4 | 2
colqwen2 | fast.enabled=true | 0
"""


@pytest.mark.e2e
@pytest.mark.parametrize(("kind", "overrides", "less"), [case for case in cases(COMPARED) if case[0] in TRAINED])
def test_a_comparison_measures_what_trains(kind, overrides, less, recipe_of, tmp_path, monkeypatch):
    # Processes of their own would cost half a minute.
    monkeypatch.setattr(comparing, "take_turns", take_turns_here)
    monkeypatch.setattr(comparing, "python", lambda code: code)
    if kind == "splade":
        from pylate_fastmaxsim.integrations.sparse_encoder import encoder as sparse_encoder

        # Tiny batches on a CPU would be left to stock.
        monkeypatch.setattr(sparse_encoder, "FEW_TOKENS", 0)
    if kind not in PAGES:
        overrides += " model.build.dropout=0" + " model.document_length=64" * (kind == "colbert")
    recipe = recipe_of(kind, overrides)
    (tmp_path / "compared.yaml").write_text(dump_recipe(recipe))
    done = command("compare", tmp_path / "compared.yaml", code=0)
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    summary, (stock, fast) = comparison["summary"], comparison["runs"].values()
    for run in (stock, fast):
        assert run["status"] == "finished" and run["steps"] == recipe.training.max_steps
        assert run["documents_per_second"] > 0 and 0 < run["ndcg@10"] <= 1
        assert all(seconds > 0 for seconds in run["phases"].values())
        # Measuring does not keep the plugin from anything. Beside Sentence Transformers 6 PyLate is not there.
        assert not [line for line in run["warnings"] if "PyLate is not" not in line]
    assert summary["largest_loss_difference"] < 1e-4
    # Near ties in rankings of other models may fall either way.
    assert kind in ("multi_vector", "splade") or abs(summary["ndcg@10_difference"]) < 1e-3
    assert stock["tokens_per_step"]["documents"] == fast["tokens_per_step"]["documents"]
    page = Page((tmp_path / "out" / "compare.html").read_text())
    if kind in PAGES:
        assert 0 <= stock["padding"] == fast["padding"] < 0.5
        assert stock["environment"]["colpali-engine"] == version("colpali-engine")
    else:
        assert 0.1 < stock["padding"] > int(less) * fast["padding"] >= 0
        # Of 64 places, and what GradCache encodes twice counts once.
        assert kind != "colbert" or 0.5 < stock["padding"] < 0.8
    if kind == "splade":
        assert 0 < fast["flops"] < fast["document_nonzeros"] and fast["query_nonzeros"] > 0 < fast["untrained"]["flops"]
        assert "FLOPS" in done.stdout and "Non-zeros of a query" in page.text
    if recipe.loss.pooling is not None:
        said = "has no pooling but the maximum: the stock run scored with the same pooling in plain PyTorch"
        assert said in " ".join(done.stdout.split()) and said in page.text


@pytest.mark.parametrize("kind", [LATE])
def test_a_recipe_trains_as_a_script_does(kind, recipe_of, tmp_path):
    recipe = recipe_of(kind, "loss.temperature=0.5 training.max_steps=4 model.build.dropout=0", rows=ROWS["triplets"])
    found, prepared = train(recipe), prepare(recipe)
    arguments = training_arguments(recipe, kind_of(recipe.model), output_dir=str(tmp_path / "s"), save_strategy="no")
    given = {"args": arguments, "train_dataset": load_data(prepared).train}
    if kind == "colbert":
        from pylate import losses as host
        from pylate.models import ColBERT
        from pylate.utils import ColBERTCollator
        from sentence_transformers import SentenceTransformerTrainer as Trainer

        model = ColBERT(prepared.model.name_or_path, device="cpu", query_length=8, document_length=24)
        given |= {"loss": host.Contrastive(model, temperature=0.5), "data_collator": ColBERTCollator(model.tokenize)}
    else:
        from sentence_transformers import MultiVectorEncoder
        from sentence_transformers import MultiVectorEncoderTrainer as Trainer
        from sentence_transformers.multi_vector_encoder import losses as host

        model = MultiVectorEncoder(prepared.model.name_or_path, device="cpu")
        given["loss"] = host.MultiVectorMultipleNegativesRankingLoss(model, scale=2.0)
    trainer = Trainer(model=model, **given)
    trainer.train()
    script = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses(found) == pytest.approx(script, rel=1e-6)
