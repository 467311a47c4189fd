"""Recipes of model.kind multi_vector: the trainer and the losses of Sentence Transformers 6, stock and fast."""

import json
import shutil
from pathlib import Path

import pytest
from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
from sentence_transformers.multi_vector_encoder import losses
from transformers.utils import is_flash_attn_2_available

import pylate_fastmaxsim
from pylate_fastmaxsim.cli.recipes import advice_on_memory
from pylate_fastmaxsim.precompile.recipe import calls_of_recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.multi_vector_recipe import tiny_multi_vector
from tests.support.tiny_recipe import text, write

TRIPLETS = [{"query": text(i, 4), "positive": text(i, 9), "negative": text(i + 3, 12)} for i in range(40)]
GRADED = [
    {"query": text(i, 4), "documents": [text(i + j, 5 + j) for j in range(3)], "scores": [3.0, 1.0 - i / 40, i / 20]}
    for i in range(40)
]
FEW_STEPS = {"max_steps": 6, "save_steps": 3, "learning_rate": 1e-3}
# Losses and the rows that they take.
LOSSES = {
    "contrastive": ({"temperature": 0.5}, TRIPLETS),
    "tokens": ({"name": "cached_contrastive", "mini_batch_num_tokens": 40, "score_mini_batch_size": 3}, TRIPLETS),
    "texts": ({"name": "cached_contrastive", "mini_batch_size": 3, "temperature": 0.5}, TRIPLETS),
    "kl": ({"name": "distillation", "temperature": 0.5}, GRADED),
    "margins": ({"name": "distillation", "objective": "margin_mse"}, GRADED),
    "pooled": ({"pooling": {"top_k": 1, "start": 4.0, "schedule": "linear"}}, TRIPLETS),
    "pooled_kl": ({"name": "distillation", "pooling": {"softmax": 0.1}}, GRADED),
}


@pytest.fixture(autouse=True)
def off():
    yield
    pylate_fastmaxsim.disable()


def recipe_of(folder: Path, loss: dict, rows: list[dict], *overrides: str, **sections):
    sections = {"evaluation": {"rows": 8}, "training": FEW_STEPS, **sections}
    return load_recipe(write(folder, tiny_multi_vector(folder, rows=rows, loss=loss, **sections)), overrides)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_recipe_trains_alike_stock_and_fast(loss, tmp_path):
    found = [
        train(recipe_of(tmp_path, *LOSSES[loss], f"fast.enabled={fast}", f"output_dir={tmp_path / fast}"))
        for fast in ("false", "true")
    ]
    stock, fast = ([value for _, value in each["losses"]] for each in found)
    assert len(stock) == 6 and fast == pytest.approx(stock, rel=1e-4)
    assert 0 < found[1]["ndcg@10"] <= 1  # near ties in rankings of such a model may fall either way
    trained = MultiVectorEncoder(found[1]["model"], device="cpu")
    assert trained.encode_query("fused interaction").shape[1] == 8
    card = Path(found[1]["model"], "README.md").read_text()
    assert "## Training recipe" in card and "kind: multi_vector" in card and "sentence-transformers 6" in card


def test_a_recipe_trains_as_a_script_does(tmp_path):
    recipe = recipe_of(tmp_path, {"temperature": 0.5}, TRIPLETS)
    found = train(recipe)
    prepared = prepare(recipe)
    model = MultiVectorEncoder(prepared.model.name_or_path, device="cpu")
    arguments = MultiVectorEncoderTrainingArguments(
        output_dir=str(tmp_path / "script"),
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-3,
        logging_steps=1,
        dataloader_drop_last=True,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type="linear",
        weight_decay=0.0,
    )
    trainer = MultiVectorEncoderTrainer(
        model=model,
        args=arguments,
        train_dataset=load_data(prepared).train,
        loss=losses.MultiVectorMultipleNegativesRankingLoss(model, scale=2.0),
    )
    trainer.train()
    script = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [value for _, value in found["losses"]] == pytest.approx(script, rel=1e-6)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    recipe = recipe_of(tmp_path, {}, TRIPLETS)
    whole = train(recipe)
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    again = train(recipe)
    assert again["resumed_from"] == "checkpoint-3"
    assert dict(again["losses"]) == pytest.approx(dict(whole["losses"]), rel=1e-5)
    # Finished: evaluated and saved once more, with the card of the training.
    card = Path(again["model"], "README.md").read_text()
    finished = train(recipe)
    assert finished["resumed_from"] == "checkpoint-6" and finished["ndcg@10"] == pytest.approx(again["ndcg@10"])
    assert "Training Logs" in card and "Training Logs" in Path(finished["model"], "README.md").read_text()


def test_gradients_are_logged_with_the_pooling_of_the_loss(tmp_path):
    training = {**FEW_STEPS, "log_gradient_concentration": 3}
    train(recipe_of(tmp_path, {"pooling": {"top_k": 2}}, TRIPLETS, training=training))
    state = json.loads((tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text())
    logged = [entry for entry in state["log_history"] if any("gradient_concentration/" in name for name in entry)]
    assert [entry["step"] for entry in logged] == [0, 3, 6]


def test_it_trains_with_checkpointed_layers_and_says_what_takes_less_memory(tmp_path):
    recipe = recipe_of(tmp_path, *LOSSES["tokens"], "training.gradient_checkpointing=true", "fast.enabled=true")
    assert train(recipe)["steps"] == 6
    assert advice_on_memory(recipe, None).startswith(
        "lower loss.mini_batch_num_tokens, or lower model.document_length;"
    )


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.lora={target_modules: x}", "^model.lora is not a key of a recipe with model.kind multi_vector; "),
        ("model.max_seq_length=64", "^model.max_seq_length is not a key of a recipe with model.kind multi_vector; "),
        ("fast.stock_masking=true", "^fast.stock_masking is not a key of a recipe with model.kind multi_vector; "),
        (
            "loss.normalize_scores=true",
            "^loss.normalize_scores is not a key of a recipe with model.kind multi_vector; ",
        ),
        ("loss.mini_batch_num_tokens=64", "^loss.mini_batch_num_tokens does not apply to loss.name contrastive"),
        ("loss.name=colbert_sigmoid", "^loss.name must be one of contrastive, cached_contrastive, distillation, got"),
        (
            "loss={name: distillation, objective: margin_mse, pooling: {top_k: 2}}",
            "^loss.pooling must be max with loss.objective margin_mse",
        ),
    ],
)
def test_keys_that_the_kind_does_not_have_are_refused(override, reason, tmp_path):
    with pytest.raises(RecipeError, match=reason):
        recipe_of(tmp_path, {}, TRIPLETS, override)


@pytest.mark.skipif(is_flash_attn_2_available(), reason="flash-attn is installed")
def test_an_attention_that_is_not_installed_is_one_sentence(tmp_path):
    with pytest.raises(RecipeError, match="^model cannot be built: FlashAttention2 has been toggled on"):
        prepare(recipe_of(tmp_path, {}, TRIPLETS, "model.attn_implementation=flash_attention_2"))


def test_warm_up_leaves_its_kernels_to_the_steps(tmp_path):
    assert calls_of_recipe(recipe_of(tmp_path, {}, TRIPLETS), None, None, [4], None) == []


def test_streamed_lists_train_alike(tmp_path):
    saved = train(recipe_of(tmp_path, {}, TRIPLETS, "training.max_steps=1"))["model"]
    rows = [{"question": text(i, 4), "pos": [text(i, 9)], "neg": [text(i + 1, 12)] * (1 + i % 3)} for i in range(40)]
    streamed = ["data.streaming=true", "data.negatives_per_query=2", "evaluation.rows=0", "training.max_steps=2"]
    streamed += ["model.build=null", f"model.name_or_path={saved}"]
    stock, fast = (
        train(recipe_of(tmp_path, {}, rows, *streamed, f"fast.enabled={fast}", f"output_dir={tmp_path / fast}"))[
            "losses"
        ]
        for fast in ("false", "true")
    )
    assert len(stock) == 2 and sum(fast, []) == pytest.approx(sum(stock, []), rel=1e-4)
