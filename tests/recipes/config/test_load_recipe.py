from pylate_fastmaxsim.recipes.config.schema import PoolingSection
from pylate_fastmaxsim.recipes.load import dump_recipe, load_recipe
from tests.support.tiny_recipe import tiny, write


def test_an_override_changes_one_of_the_sections_that_an_alias_makes_equal(tmp_path):
    file = tmp_path / "aliased.yaml"
    file.write_text(
        "{output_dir: out, model: {name_or_path: some/model}, loss: {name: distillation},"
        " data: {source: distillation, name: mined}, mining: {teacher: some/teacher,"
        " pairs: &rows {source: hub, name: some/rows, split: train}, corpus: *rows}}"
    )
    mining = load_recipe(file, ["mining.corpus.name=some/corpus", "mining.corpus.columns=[text]"]).mining
    assert (mining.corpus.name, mining.corpus.split, mining.corpus.columns) == ("some/corpus", "train", ["text"])
    assert (mining.pairs.name, mining.pairs.split, mining.pairs.columns) == ("some/rows", "train", None)


def test_merge_keys_bring_in_what_a_section_does_not_say_itself(tmp_path):
    # The first is built before the one that it takes over, which has a merge key and a key of that itself.
    text = """
    output_dir: out
    model: {build: {<<: &wide {<<: &narrow {hidden_size: 16, dropout: 0.5}, hidden_size: 32}, num_hidden_layers: 1}}
    data: {source: hub, name: a/b}
    mining: {pairs: {source: hub, name: a/b}, teacher: a/b}
    """
    (tmp_path / "merged.yaml").write_text(text)
    build = load_recipe(tmp_path / "merged.yaml").model.build
    assert (build.hidden_size, build.dropout, build.num_hidden_layers) == (32, 0.5, 1)


def test_overrides_are_yaml_with_exponents_and_a_pooling_is_one_key_or_the_word_max(tmp_path):
    overrides = ["training.learning_rate=3e-6", "fast.enabled=true", "data.columns=[a, b]", "loss.temperature=2"]
    recipe = load_recipe(file := write(tmp_path, tiny(tmp_path)), overrides)
    assert (recipe.training.learning_rate, recipe.loss.temperature) == (3e-6, 2.0)
    assert recipe.fast.enabled is True and recipe.data.columns == ["a", "b"]
    assert load_recipe(file, ["loss.pooling=max"]) == load_recipe(file, ["loss.pooling=null"]) == load_recipe(file)
    annealed = load_recipe(file, ["loss.pooling.top_k=2", "loss.pooling.start=16", "loss.pooling.schedule=linear"])
    assert annealed.loss.pooling == PoolingSection(top_k=2, start=16.0, schedule="linear")
    (tmp_path / "dumped.yaml").write_text(dump_recipe(annealed))
    assert load_recipe(tmp_path / "dumped.yaml") == annealed


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "encoder").mkdir()
    values = tiny(tmp_path, model={"name_or_path": "~/encoder"}, data={"files": ["~/pairs.jsonl"]})
    values["model"].pop("build")
    values |= {"output_dir": "~/runs", "evaluation": {"beir": "~/scifact"}}
    values["mining"] = {"pairs": {"source": "hub", "name": "~/pairs"}, "teacher": "~/teacher", "num_negatives": 1}
    recipe = load_recipe(write(tmp_path, values))
    paths = [recipe.output_dir, recipe.model.name_or_path, *recipe.data.files, recipe.evaluation.beir]
    paths += [recipe.mining.pairs.name, recipe.mining.teacher]
    assert paths == [str(tmp_path / name) for name in ("runs", "encoder", "pairs.jsonl", "scifact", "pairs", "teacher")]
