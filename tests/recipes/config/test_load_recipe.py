"""How a recipe is read: its keys, overrides and paths, and what it gets wrong."""

import os

import pytest

from pylate_fastmaxsim.recipes.config.schema import PoolingSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import dump_recipe, load_recipe
from tests.support.paths import RECIPES
from tests.support.tiny_recipe import tiny, write

COLQWEN = RECIPES / "colqwen_vidore.yaml"


def test_overrides_are_yaml_and_numbers_may_be_written_with_an_exponent(tmp_path):
    overrides = ["training.learning_rate=3e-6", "fast.enabled=true", "data.columns=[a, b]", "loss.temperature=2"]
    recipe = load_recipe(write(tmp_path, tiny(tmp_path)), overrides)
    assert recipe.training.learning_rate == 3e-6 and recipe.loss.temperature == 2.0
    assert recipe.fast.enabled is True and recipe.data.columns == ["a", "b"]


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


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainin.max_steps=3", "trainin is not a key of a recipe with model.kind colbert; did you mean 'training'?"),
        (
            "model.build.depth=3",
            "model.build.depth is not a key of a recipe with model.kind colbert; allowed here: vocab_size, ",
        ),
        ("training.max_steps=many", "training.max_steps must be an integer of at least 1 or null, got 'many'."),
        ("training.learning_rate=.nan", "training.learning_rate must be a number of at least 0, got nan."),
        ("training.precision=int8", "training.precision must be one of auto, fp32, bf16, fp16, got 'int8'."),
        ("training.seed=5000000000", "training.seed must be an integer of at least 0 and at most 4294967295, got 5000"),
        ("fast.enabled=maybe", "fast.enabled must be true or false, got 'maybe'."),
        ("fast=true", "fast must be a section with the keys enabled, padding_free, compile, "),
        ("data.files=pairs.jsonl", "data.files must be a list of at least one string or null, got 'pairs.jsonl'."),
        ("name=../../x", "name must be a name, not a path out of the folder of an index, got '../../x'."),
        ("data.columns=[query, query]", "data.columns must name each column once, got query, query."),
        ("data.files=[missing.jsonl]", "data.files: missing.jsonl is not a file."),
        (
            "data.files=[rows.txt]",
            "data.files must end in .parquet, .jsonl, .json, .csv or .tsv (these four also with .gz), got ",
        ),
        ("data.name=some/data", "data.name does not apply to data.source files, but to hub and distillation."),
        ("data={source: hub}", "data.name is missing; data.source hub needs it."),
        ("data={source: docstrings, packages: [no_such]}", "data.packages: No package named 'no_such' is installed."),
        ("data={source: distillation, name: a}", "loss.name must be distillation with data.source distillation"),
        ("model.name_or_path=a/b", "model must have exactly one of name_or_path, build and token_table."),
        (
            "model={token_table: ./nowhere}",
            "model.token_table must be a model on the Hub or a directory, but ./nowhere is not there.",
        ),
        ("model.build.num_attention_heads=3", "model.build.hidden_size must be a multiple of 2 * num_attention_heads"),
        (
            "loss.mini_batch_size=8",
            "loss.mini_batch_size does not apply to loss.name contrastive, but to cached_contrastive.",
        ),
        ("loss.temperature=0", "loss.temperature must be a number greater than 0 or null, got 0.0."),
        (
            "loss.pooling=mean",
            "loss.pooling must be max or a section with the keys top_k, softmax, log_sum_exp, start, ",
        ),
        ("loss.pooling.top_k=2.5", "loss.pooling.top_k must be an integer of at least 1 or null, got 2.5."),
        ("loss.pooling={}", "loss.pooling must have exactly one of top_k, softmax, log_sum_exp, got none; "),
        ("loss.pooling={top_k: 4, softmax: 1}", "top_k, softmax, log_sum_exp, got top_k and softmax; replace it as a "),
        (
            "loss.pooling.softmax=1e-300",
            "loss.pooling.softmax must be a number of at least 1e-30 and at most 1e+30 or null, got 1e-300.",
        ),
        ("loss.pooling={softmax: 1, start: 2}", "loss.pooling.schedule is missing; a schedule has a start, "),
        ("loss.pooling={softmax: 1, schedule: linear}", "loss.pooling.start is missing; a schedule has a start, "),
        (
            "loss.pooling={softmax: 1, start: 0, schedule: linear}",
            "loss.pooling.start must be a number of at least 1e-30 and at most 1e+30 or null, got 0.0.",
        ),
        (
            "loss.pooling={top_k: 1, start: 2.5, schedule: linear}",
            "loss.pooling.start must be an integer with top_k, got ",
        ),
        (
            "loss.pooling={top_k: 1, schedule: step}",
            "loss.pooling.schedule must be one of linear, cosine or null, got ",
        ),
        ("evaluation.beir=some/data", "evaluation must have at most one of rows, beir and nano_beir."),
        ("evaluation.corpus_format=int8", "evaluation.corpus_format applies to evaluation.beir, which is missing."),
        (
            "evaluation.corpus_format=int4",
            "evaluation.corpus_format must be one of int8, fp8, residual-1, residual-2, residual-4 or null, got 'int4'.",
        ),
        ("output_dir=''", "output_dir must not be empty."),
        ("training", "--set training: write it as key=value, for example training.max_steps=100."),
        ("name.x=1", "--set name.x=1: name is not a section."),
        ("training.seed={a: 1, a: 2}", "--set training.seed: 'a' is given twice (line 1); give it once."),
        ("training.seed=[1", "--set training.seed, line 1: not valid YAML: "),
    ],
)
def test_a_bad_recipe_gets_one_sentence_that_names_the_key(override, sentence, tmp_path, monkeypatch):
    file = write(tmp_path, {"name": "x", **tiny(tmp_path)})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as error:
        load_recipe(file, [override])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_compressed_documents_are_pooled_by_the_maximum(tmp_path):
    options = ["evaluation={beir: some/data, corpus_format: fp8}", "loss.pooling={top_k: 4}"]
    with pytest.raises(RecipeError, match="loss.pooling must be max with evaluation.corpus_format: no other pools"):
        load_recipe(write(tmp_path, tiny(tmp_path)), options)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("- a\n", "a recipe is a mapping with the keys name, output_dir, model, "),
        ("model: {build: {}}\ndata: {source: hub, name: a}\n", "output_dir is missing; it must be a string."),
        ("output_dir: a\noutput_dir: b\n", "'output_dir' is given twice (line 2); give it once."),
        ("output_dir: {{ out }}\n", "bad.yaml, line 1: not valid YAML: found unhashable key."),
        ("output_dir: !!python/object/apply:os.getcwd []\n", "not valid YAML: "),
        (None, "Cannot read the recipe "),
    ],
)
def test_a_bad_file_gets_one_sentence(content, sentence, tmp_path):
    if content is not None:
        (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "bad.yaml")
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("loss.name=contrastive", "loss.name must be one of colbert, colbert_pairwise_ce, .* got 'contrastive'"),
        ("loss.pooling.top_k=4", "loss.pooling is not a key of a recipe with model.kind colqwen2; "),
        ("fast.compile=true", "fast.compile is not a key of a recipe with model.kind colqwen2; did you mean|allowed"),
        ("loss.tau=0", "loss.tau must be a number greater than 0 or null, got 0.0."),
        (
            "loss.in_batch_term_weight=0.5",
            "loss.in_batch_term_weight does not apply to loss.name colbert, but to colbert_negative_ce and ",
        ),
        ("model.query_length=32", "model.query_length is not a key of a recipe with model.kind colqwen2; "),
        ("model.kind=colbert", "model.dtype is not a key of a recipe with model.kind colbert; "),
        ("model.kind=colpali", "model.max_visual_tokens is not a key of a recipe with model.kind colpali; "),
        ("model.lora={r: 8}", "model.lora.target_modules is missing"),
        ("data={source: docstrings, packages: [torch]}", "data.source must be hub or files with model.kind colqwen2"),
        (
            "training.batch_sampler=no_duplicates",
            "training.batch_sampler is not a key of a recipe with model.kind colqwen2; ",
        ),
        ("evaluation={beir: BeIR/scifact}", "evaluation.beir is not a key of a recipe with model.kind colqwen2; "),
    ],
)
def test_what_does_not_apply_to_pages_is_refused(override, sentence):
    with pytest.raises(RecipeError, match=sentence):
        load_recipe(COLQWEN, [override])


def test_paths_that_cannot_be_used_are_named(tmp_path, monkeypatch):
    found = os.stat

    def stat(path, **options):
        if str(path).endswith("pairs.jsonl"):
            raise PermissionError(13, "Permission denied", path)
        return found(path, **options)

    recipe, file = write(tmp_path, tiny(tmp_path)), "pairs.jsonl"
    monkeypatch.chdir(tmp_path)
    for override, sentence in {
        f"model={{name_or_path: {file}}}": "model.name_or_path must be a model on the Hub or a directory",
        f"data={{source: hub, name: {file}}}": "data.name must be data on the Hub or a directory",
        f"evaluation={{beir: {file}}}": "evaluation.beir must be a collection on the Hub or a directory",
        f"mining={{teacher: {file}, pairs: {{source: hub, name: a/b}}}}": "mining.teacher must be a model on the Hub",
        f"output_dir={file}/below": "output_dir must be a directory or a path yet to be made",
    }.items():
        with pytest.raises(RecipeError, match=f"^{sentence}.*, but .*{file} is a file.$"):
            load_recipe(recipe, [override])
    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(RecipeError, match="pairs.jsonl cannot be reached: Permission denied."):
        load_recipe(recipe)


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


def test_a_pooling_is_one_key_or_the_word_max(tmp_path):
    file = write(tmp_path, tiny(tmp_path))
    assert load_recipe(file, ["loss.pooling=max"]) == load_recipe(file, ["loss.pooling=null"]) == load_recipe(file)
    annealed = load_recipe(file, ["loss.pooling.top_k=2", "loss.pooling.start=16", "loss.pooling.schedule=linear"])
    assert annealed.loss.pooling == PoolingSection(top_k=2, start=16.0, schedule="linear")
    (tmp_path / "dumped.yaml").write_text(dump_recipe(annealed))
    assert load_recipe(tmp_path / "dumped.yaml") == annealed
    with pytest.raises(RecipeError, match="^fast.stock_masking must be false with loss.pooling: "):
        load_recipe(file, ["loss.pooling.top_k=2", "fast.stock_masking=true"])


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
