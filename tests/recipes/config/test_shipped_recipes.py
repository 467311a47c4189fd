import pytest

from pylate_fastmaxsim.integrations.pylate.static import token_vectors
from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection
from pylate_fastmaxsim.recipes.load import dump_recipe, load_recipe
from pylate_fastmaxsim.recipes.mining.mine import mine
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.training.train import train
from tests.support import models
from tests.support.mining_recipe import answers, write_pairs
from tests.support.paths import RECIPES
from tests.support.tiny_recipe import few_steps, hub_dataset, kd_subsets, split_overrides, text


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_they_are_valid_and_survive_a_round_trip(name, tmp_path):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe
    assert recipe.name == name and not recipe.model.trust_remote_code


def trained(name: str, folder, *overrides: str) -> list[float]:
    options = few_steps(folder, *overrides)
    if name == "splade":
        own = ("model.embedding_size", "model.query_length", "model.document_length")
        options = [option for option in options if not option.startswith(own)]
    result = train(load_recipe(RECIPES / f"{name}.yaml", options))
    assert result["steps"] == len(result["losses"]) == 2 and 0 <= result["ndcg@10"] <= 1 and result["fast"]["enabled"]
    return [loss for _, loss in result["losses"]]


TRIPLETS = [{"query": text(i, 5), "positive": text(i, 9), "negative": text(i + 1, 30)} for i in range(40)]
GOOAQ = [{"query": text(i, 5), "document": text(i, 3 + i % 20), "dataset": "gooaq", "shard": 0} for i in range(40)]
# More rows are longer than 2,048 tokens, at one token a word or more, than are held out.
LENGTHS = enumerate((2500, 2500, 2500, 50, 50, 50))
LONG = [{"anchor": text(i, 5), "positive": text(i, n), "negative": text(i + 1, 300)} for i, n in LENGTHS]
LONG_ENCODER = {"max_position_embeddings": 2048, "num_hidden_layers": 1, "num_attention_heads": 1}
FEW_LONG = "evaluation.rows=2 model.document_length=2048 training.per_device_train_batch_size=2"
# The subsets of the data, the encoder and its changes, and overrides.
STAND_INS = {
    "colbert_msmarco": ({"triplet": TRIPLETS}, "bert", {}, ""),
    "colbert_gradcache": ({"gooaq": GOOAQ}, "modernbert", {}, "data.config=gooaq data.split=train"),
    "long_documents": ({"en-triplet": LONG}, "modernbert", LONG_ENCODER, FEW_LONG),
    "colbert_kd": (kd_subsets(), "xlm-roberta", {}, "data.n_ways=4"),
    "splade": ({"triplet": TRIPLETS}, "bert", {"masked_lm": True, "max_position_embeddings": 512}, ""),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", STAND_INS)
def test_they_train_on_stand_ins(name, encoder, tmp_path, caplog):
    subsets, family, changes, written = STAND_INS[name]
    overrides = [f"model.name_or_path={encoder(family, **changes)}", "evaluation.rows=8", *split_overrides(written)]
    overrides.append(f"data.name={hub_dataset(tmp_path / 'data', **subsets)}")
    trained(name, tmp_path / "out", *overrides)
    if name == "long_documents":
        recipe = load_recipe(RECIPES / f"{name}.yaml", few_steps(tmp_path / "out", *overrides))
        features = load_model(recipe.model, "cpu", seed=0).tokenize([LONG[0]["positive"]], is_query=False)
        assert features["attention_mask"].sum() == 2048 and recipe.training.gradient_checkpointing
    if name == "colbert_msmarco":
        # The recipe's dropouts are those of ModernBERT.
        (said,) = [line for line in caplog.messages if line.startswith("model.config_kwargs is left out where ")]
        assert said.endswith("no such value: embedding_dropout, attention_dropout, mlp_dropout.")
    if name == "colbert_kd":  # as a second stage, of a model that was trained
        overrides[0] = f"model.name_or_path={tmp_path / 'out' / 'model'}"
        trained(name, tmp_path / "second", *overrides)


@pytest.mark.e2e
def test_a_token_table_is_mined_and_trained_from_its_teacher(encoder, tmp_path):
    teacher = models.load_model(encoder("bert"))
    teacher.save_pretrained(str(tmp_path / "teacher"))
    write_pairs(tmp_path / "pairs", answers())
    mining = {"pairs.name": tmp_path / "pairs", "teacher": tmp_path / "teacher", "num_negatives": 3, "range_max": 12}
    overrides = [f"mining.{key}={value}" for key, value in mining.items()]
    overrides += [f"model.token_table={tmp_path / 'teacher'}", f"data.name={tmp_path / 'mined'}", "evaluation.rows=8"]
    overrides.append("model.embedding_size=null")
    mined = mine(load_recipe(RECIPES / "static_late_interaction.yaml", few_steps(tmp_path / "mining", *overrides)))
    assert mined["rows"]
    first, second = trained("static_late_interaction", tmp_path / "out", *overrides)
    assert second < first
    model = load_model(ColBERTSection(name_or_path=str(tmp_path / "out" / "model")), "cpu", seed=0)
    moved = (token_vectors(model) - token_vectors(teacher)).norm(dim=1)
    assert 1e-4 < moved.max() < 0.2
