"""Recipes are read with overrides and aliases; what one gets wrong is a sentence that names the key, before anything is written."""

import os

import pytest

from pylate_fastmaxsim.recipes.config.schema import PoolingSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import dump_recipe, load_recipe
from tests.support.case_tables import case_table
from tests.support.paths import RECIPES
from tests.support.recipe_kinds import tiny_of
from tests.support.tiny_recipe import split_overrides, tiny, write


@case_table("""
kind | overrides | sentence
colbert | trainin.max_steps=3 | trainin is not a key of a recipe with model.kind colbert; did you mean 'training'?
colbert | model.build.depth=3 | model.build.depth is not a key of a recipe with model.kind colbert; allowed here: vocab
colbert | training.max_steps=many | training.max_steps must be an integer of at least 1 or null, got 'many'.
colbert | training.learning_rate=.nan | training.learning_rate must be a number of at least 0, got nan.
colbert | training.num_train_epochs=0 training.max_steps=null | training.num_train_epochs must be greater than 0 where
colbert | training.lr=1 | training.lr is neither a key of a recipe nor an argument of the trainer; did you mean 'learning_rate'?
colbert | training.batch_size=8 | did you mean 'per_device_train_batch_size'?
splade | training.epochs=8 | did you mean 'num_train_epochs'?
colbert | training.warmup_ration=0.1 | did you mean 'warmup_ratio'?
colbert | training.zzz=8 | training.zzz is neither a key of a recipe nor an argument of the trainer; they are in docs/reference.md
colbert | training.warmup_ratio=2 | training.warmup_ratio must be a number of at least 0 and at most 1 or null, got 2.0.
colbert | training.warmup_ratio=0.1 training.warmup_steps=3 | training.warmup_steps must be 0 where training.warmup_ratio is
colbert | training.tf32=perhaps | training.tf32 must be true or false or null, got 'perhaps'.
pages | training.eval_strategy=[steps] | training.eval_strategy must be a string, got ['steps'].
colbert | training.bf16=true training.precision=fp16 | training.precision must be auto where training.bf16 or training.fp16
colbert | training.output_dir=x | training.output_dir is not taken: it is a key of the recipe itself.
colbert | training.save_only_model=true | is not taken: a run that goes on would not be the one that was interrupted.
colbert | training.hub_token=x | training.hub_token is not taken: recipes stand in cards; give it by HF_TOKEN or
colbert | training.hub_model_id=a/b | training.push_to_hub must be true with training.hub_model_id.
colbert | training.early_stopping_patience=2 | training.eval_strategy must be steps or epoch with training.early_stopping
colbert | training.eval_strategy=steps evaluation.rows=0 | evaluation.rows, data, beir or nano_beir is missing;
colbert | training.load_best_model_at_end=true training.eval_strategy=steps training.save_total_limit=1
  | training.save_total_limit must be at least 2 with load_best_model_at_end: the best checkpoint and the last.
colbert | training.load_best_model_at_end=true training.eval_strategy=epoch
  | training.save_strategy must be epoch or best with load_best_model_at_end, got steps.
colbert | evaluation.data={source: files, files: [x.jsonl]} | evaluation.data.files: x.jsonl is not a file.
colbert | data.more=[{source: docstrings, packages: [torch]}] | data.more[0].source must be hub, files or distillation
colbert | data.more=[{source: hub, name: a, streaming: true}] | data.more[0].streaming does not apply: only data itself has it.
colbert | data.more={source: hub} | data.more must be a list of sections with the keys source, name,
colbert | fast.enabled=maybe | fast.enabled must be true or false, got 'maybe'.
colbert | name=../../x | name must be a name, not a path out of the folder of an index, got '../../x'.
colbert | data.files=pairs.jsonl | data.files must be a list of at least one string or null, got 'pairs.jsonl'.
colbert | data.columns=[query, query] | data.columns must name each column once, got query, query.
colbert | data.files=[missing.jsonl] | data.files: missing.jsonl is not a file.
colbert | data.files=[rows.txt] | data.files must end in .parquet, .jsonl, .json, .csv or .tsv (these four also with .gz), got
colbert | data.name=some/data | data.name does not apply to data.source files, but to hub and distillation.
colbert | data={source: hub} | data.name is missing; data.source hub needs it.
colbert | data={source: docstrings, packages: [no_such]} | data.packages: No package named 'no_such' is installed.
colbert | data={source: distillation, name: a} | loss.name must be distillation with data.source distillation
colbert | model.name_or_path=a/b | model must have exactly one of name_or_path, build and token_table.
colbert | model.build.num_attention_heads=3 | model.build.hidden_size must be a multiple of 2 * num_attention_heads
colbert | loss.mini_batch_size=8 | loss.mini_batch_size does not apply to loss.name contrastive, but to cached_contrastive.
colbert | loss.temperature=0 | loss.temperature must be a number greater than 0 or null, got 0.0.
colbert | loss.pooling=mean | loss.pooling must be max or a section with the keys top_k, softmax, log_sum_exp, start,
colbert | loss.pooling={top_k: 4, softmax: 1} | top_k, softmax, log_sum_exp, got top_k and softmax; replace it as a
colbert | loss.pooling={softmax: 1, start: 2} | loss.pooling.schedule is missing; a schedule has a start,
colbert | loss.pooling={top_k: 1, start: 2.5, schedule: linear} | loss.pooling.start must be an integer with top_k, got
colbert | loss.pooling.top_k=2 fast.stock_masking=true | fast.stock_masking must be false with loss.pooling:
colbert | loss.pool_factors=2 | loss.pool_factors must be a list of at least one number of at least 1 or null, got 2.
colbert | loss.pool_factors=[1,.5] | loss.pool_factors[1] must be a number of at least 1, got 0.5.
multi_vector | loss.pool_weights=[1] | loss.pool_weights must be one for each of loss.pool_factors.
colbert | loss.pool_factors=[2] fast.enabled=false | fast.enabled must be true with loss.pool_factors: PyLate's own contrastive
colbert | evaluation.beir=some/data | evaluation must have at most one of rows, data, beir and nano_beir.
colbert | evaluation={rows: 0, nano_beir: [nq, ms_marco]} | evaluation.nano_beir must
colbert | evaluation={rows: 0, nano_beir: [nq, NQ]} | evaluation.nano_beir must
colbert | evaluation.corpus_format=int8 | evaluation.corpus_format applies to evaluation.beir, which is missing.
colbert | mining={teacher: pairs.jsonl, pairs: {source: hub, name: a}} | mining.teacher must be a model on the Hub
colbert | output_dir='' | output_dir must not be empty.
colbert | output_dir=pairs.jsonl/below | output_dir must be a directory or a path yet to be made, but
colbert | training | --set training: write it as key=value, for example training.max_steps=100.
colbert | name.x=1 | --set name.x=1: name is not a section.
colbert | training.seed={a: 1,a: 2} | --set training.seed: 'a' is given twice (line 1); give it once.
colbert | data.streaming=true training.max_steps=null | training.max_steps is missing; with data.streaming it says when
colbert | data.streaming=true | evaluation.rows must be 0 with data.streaming, whose rows are read once
colbert | data.streaming=true evaluation.rows=0 data.max_rows=9 | data.max_rows does not apply to data.streaming: it needs all
colbert | data.streaming=true evaluation.rows=0 | model.build does not apply to data.streaming
colbert | data={source: docstrings, packages: [torch], streaming: true} | data.source must be hub or files with data.streaming
colbert | data.streaming=true evaluation.rows=0 model={name_or_path: a/b} training.batch_sampler=no_duplicates
  | training.batch_sampler does not apply to data.streaming
multi_vector | fast.stock_masking=true | fast.stock_masking is not a key of a recipe with model.kind multi_vector;
multi_vector | loss={name: distillation, objective: margin_mse, pooling: {top_k: 2}}
  | loss.pooling must be max with loss.objective margin_mse
splade | loss.pooling={top_k: 2} | loss.pooling is not a key of a recipe with model.kind splade;
splade | loss.mini_batch_size=2 | does not apply to loss.name contrastive, but to cached_contrastive and distillation.
splade | loss.regularizers=null | loss.regularizers is missing; model.kind splade needs the weights of its regulariz
splade | loss.regularizers={document_weight: 1, document: l1, document_threshold: 3}
  | loss.regularizers.document_threshold applies to the regularizer flops only.
splade | loss={name: distillation, objective: margin_mse, temperature: 2, regularizers: {document_weight: 1}}
  | loss.temperature does not apply to loss.objective margin_mse, which compares scores as they are.
splade | training.query_learning_rate=0.1 | training.query_learning_rate applies to model.inference_free only.
pages | model.kind=page | model.kind must be one of colbert, multi_vector, splade, colpali, colqwen2, got 'page'.
pages | model.lora={r: 8} | model.lora.target_modules is missing
pages | loss.in_batch_term_weight=0.5 | does not apply to loss.name colbert, but to colbert_negative_ce and
pages | data={source: docstrings, packages: [torch]} | data.source must be hub or files with model.kind colqwen2
""")
def test_a_bad_recipe_gets_one_sentence_that_names_the_key(kind, overrides, sentence, tmp_path, monkeypatch):
    if kind == "pages":
        file = RECIPES / "colqwen_vidore.yaml"
    else:
        file = write(tmp_path, {"name": "x", **tiny_of(kind, tmp_path)})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as error:
        load_recipe(file, split_overrides(overrides))
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("- a\n", "a recipe is a mapping with the keys name, output_dir, model, "),
        ("model: {build: {}}\ndata: {source: hub, name: a}\n", "output_dir is missing; it must be a string."),
        ("output_dir: a\noutput_dir: b\n", "'output_dir' is given twice (line 2); give it once."),
        ("output_dir: {{ out }}\n", "bad.yaml, line 1: not valid YAML: found unhashable key."),
        ("output_dir: !!python/object/apply:os.getcwd []\n", "not valid YAML: "),
    ],
)
def test_a_bad_file_gets_one_sentence(content, sentence, tmp_path):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "bad.yaml")
    assert sentence in str(error.value)


def test_a_path_without_permission_is_named(tmp_path, monkeypatch):
    found = os.stat

    def stat(path, **options):
        if str(path).endswith("pairs.jsonl"):
            raise PermissionError(13, "Permission denied", path)
        return found(path, **options)

    recipe = write(tmp_path, tiny(tmp_path))
    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(RecipeError, match="pairs.jsonl cannot be reached: Permission denied."):
        load_recipe(recipe)


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
