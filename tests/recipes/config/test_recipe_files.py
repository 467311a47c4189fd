"""How a recipe is read: its keys, overrides and paths, and what it gets wrong."""

import dataclasses
import json

import pytest
from paths import RECIPES

pytest.importorskip("datasets")
pytest.importorskip("pylate")

from tiny_recipe import tiny, write

from pylate_fastmaxsim.recipes.config.schema import FastSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe

COLQWEN = RECIPES / "colqwen_vidore.yaml"


def test_overrides_are_yaml_and_numbers_may_be_written_with_an_exponent(tmp_path):
    recipe = load_recipe(
        write(tmp_path, tiny(tmp_path)),
        ["training.learning_rate=3e-6", "fast.enabled=true", "data.columns=[query, positive]", "loss.temperature=2"],
    )
    assert recipe.training.learning_rate == 3e-6
    assert recipe.fast.enabled is True
    assert recipe.data.columns == ["query", "positive"]
    assert recipe.loss.temperature == 2.0


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainin.max_steps=3", "trainin is not a key of a recipe; did you mean 'training'?"),
        ("training.learning_rat=3", "training.learning_rat is not a key of a recipe; did you mean 'learning_rate'?"),
        ("model.build.depth=3", "model.build.depth is not a key of a recipe; allowed here: vocab_size, "),
        ("training.max_steps=many", "training.max_steps must be an integer of at least 1 or null, got 'many'."),
        ("training.max_steps=0", "training.max_steps must be an integer of at least 1 or null, got 0."),
        ("training.max_steps=true", "training.max_steps must be an integer of at least 1 or null, got True."),
        (
            "training.learning_rate=fast",
            "training.learning_rate must be a number of at least 0 and at most 1e+37, got 'fast",
        ),
        (
            "training.learning_rate=.nan",
            "training.learning_rate must be a number of at least 0 and at most 1e+37, got nan.",
        ),
        ("training.precision=int8", "training.precision must be one of auto, fp32, bf16, fp16, got 'int8'."),
        ("fast.enabled=maybe", "fast.enabled must be true or false, got 'maybe'."),
        (
            "fast=true",
            "fast must be a section with the keys enabled, padding_free, compile, stock_masking, grad_filter, ring, fused_head, got True.",
        ),
        ("data.files=pairs.jsonl", "data.files must be a list of at least one string or null, got 'pairs.jsonl'."),
        ("data.packages=[]", "data.packages must be a list of at least one string or null, got []."),
        ("data.columns=[query, query]", "data.columns must name each column once, got query, query."),
        ("model.build.dropout=1.5", "model.build.dropout must be a number of at least 0 and at most 1, got 1.5."),
        (
            "training.seed=99999999999999999999",
            "training.seed must be an integer of at least 0 and at most 4294967295, got 99999999999999999999.",
        ),
        ("model.build.vocab_size=99999999999", "model.build.vocab_size must be an integer of at least 512 and at most"),
        (
            f"model.build.local_attention={10**29}",
            "model.build.local_attention must be an integer of at least 2 and at ",
        ),
        (f"model.document_length={10**29}", "model.document_length must be an integer of at least 3 and at most"),
        (
            f"training.gradient_accumulation_steps={10**29}",
            "training.gradient_accumulation_steps must be an integer of ",
        ),
        (
            "training.learning_rate=1e300",
            "training.learning_rate must be a number of at least 0 and at most 1e+37, got ",
        ),
        (f"training.adam_epsilon={10**400}", "training.adam_epsilon must be a number of at least 0, got 1000"),
        (
            "training.seed=" + "[" * 5000 + "]" * 5000,
            "--set training.seed: its sections are nested deeper than can be ",
        ),
        (
            "model.config_kwargs=&c {a: [1, *c]}",
            "--set model.config_kwargs: an alias names what it stands in (line 1); name something that ends before it.",
        ),
        ("training.seed={<<: {a: 1}, <<: {b: 1}}", "--set training.seed: '<<' is given twice (line 1); give it once."),
        (
            "training.seed={<<: 1}",
            "--set training.seed, line 1: not valid YAML: expected a mapping or list of mappings ",
        ),
        ("model.embedding_size=99999999999", "model.embedding_size must be an integer of at least 1 and at most"),
        (
            "output_dir=/dev/null/out",
            "output_dir must be a directory or a path yet to be made, but /dev/null is a file.",
        ),
        ("output_dir=''", "output_dir must not be empty."),
        ("data.files=['']", "data.files must not be empty."),
        ("output_dir=a::b", "output_dir must not have :: in it, by which datasets joins file systems, got a::b."),
        ("model.config_kwargs={a: [2024-01-01]}", "model.config_kwargs must hold what the JSON of a model's "),
        ("model.config_kwargs={a: .nan}", "and mappings, got {'a': nan}."),
        (
            'name="\\ud800"',
            "--set name, line 1: not valid YAML: '\\ud800' has half of a character.",
        ),
        (
            "model.config_kwargs={attention_dropout: -1}",
            "model.config_kwargs.attention_dropout must be a number of at least 0 and at most 1, got -1.",
        ),
        (
            "model.config_kwargs={num_hidden_layers: 0}",
            "model.config_kwargs.num_hidden_layers must be an integer of at least 1, got 0.",
        ),
        ("data.files=[missing.jsonl]", "data.files: missing.jsonl is not a file."),
        ("data.files=[rows.csv]", "data.files must end in .jsonl or .parquet, got rows.csv."),
        ("data.source=web", "data.source must be one of docstrings, hub, files, distillation, got 'web'."),
        ("data.name=some/data", "data.name does not apply to data.source files, which takes files."),
        ("data.source=null", "data.source must be one of docstrings, hub, files, distillation, got None."),
        ("model.name_or_path=a/b", "model must have exactly one of name_or_path and build."),
        ("model.build.num_attention_heads=3", "model.build.hidden_size must be a multiple of 2 * num_attention_heads"),
        ("loss.name=triplet", "loss.name must be one of contrastive, cached_contrastive, distillation, colbert,"),
        ("loss.mini_batch_size=8", "loss.mini_batch_size does not apply to the contrastive loss, which takes "),
        ("loss.temperature=0", "loss.temperature must be greater than 0, got 0.0."),
        ("training", "--set training: write it as key=value, for example training.max_steps=100."),
        ("name.x=1", "--set name.x=1: name is not a section."),
        ("training.seed={a: 1, a: 2}", "--set training.seed: 'a' is given twice (line 1); give it once."),
        ("training.seed=[1", "--set training.seed, line 1: not valid YAML: "),
        ("training.seed={[a]: 1}", "--set training.seed, line 1: not valid YAML: found unhashable key."),
        (
            "name=2024-31-12",
            "--set name, line 1: not valid YAML: '2024-31-12' is written like a value of the type timestamp but is none; "
            "quote it if it is text.",
        ),
        ("name=0x_", "'0x_' is written like a value of the type int but is none; quote it if it is text."),
        ("name=!!bool maybe", "'maybe' is written like a value of the type bool but is none; quote it if it is text."),
    ],
)
def test_a_bad_recipe_gets_one_sentence_that_names_the_key(override, sentence, tmp_path):
    file = write(tmp_path, {"name": "x", **tiny(tmp_path)})
    with pytest.raises(RecipeError) as error:
        load_recipe(file, [override])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_options_of_the_flag_that_do_not_concern_pages_are_refused():
    other = {"grad_filter": "auto", **dict.fromkeys(("enabled", "padding_free", "fused_head"), False)}
    for name in (field.name for field in dataclasses.fields(FastSection)):
        override = f"fast.{name}={json.dumps(other.get(name, True))}"
        if name in ("enabled", "grad_filter"):
            assert load_recipe(COLQWEN, [override]).fast != load_recipe(COLQWEN).fast
            continue
        with pytest.raises(RecipeError, match=f"^fast.{name} does not apply to model.kind colqwen2.$"):
            load_recipe(COLQWEN, [override])


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


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "encoder").mkdir()
    values = tiny(tmp_path, model={"name_or_path": "~/encoder"}, data={"files": ["~/pairs.jsonl"]})
    values["model"].pop("build")
    pairs = {"source": "hub", "name": "~/pairs"}
    values |= {"output_dir": "~/runs", "evaluation": {"beir": "~/scifact"}}
    values["mining"] = {"pairs": pairs, "teacher": "~/teacher", "num_negatives": 1}
    recipe = load_recipe(write(tmp_path, values))
    paths = [recipe.output_dir, recipe.model.name_or_path, *recipe.data.files, recipe.evaluation.beir]
    paths += [recipe.mining.pairs.name, recipe.mining.teacher]
    assert paths == [str(tmp_path / name) for name in ("runs", "encoder", "pairs.jsonl", "scifact", "pairs", "teacher")]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("- a\n", "a recipe is a mapping with the keys name, output_dir, model, "),
        ("model: {build: {}}\ndata: {source: hub, name: a}\n", "output_dir is missing; it must be a string."),
        ("output_dir: a\noutput_dir: b\n", "'output_dir' is given twice (line 2); give it once."),
        ("output_dir: a\nmodel: &m {build: *m}\n", "bad.yaml: an alias names what it stands in (line 2); "),
        ("output_dir: {{ out }}\n", "bad.yaml, line 1: not valid YAML: found unhashable key."),
        ("output_dir: !!python/object/apply:os.getcwd []\n", "not valid YAML: "),
        ("output_dir: a\nmodel: {build: {}}\ndata: {source: hub}\n", "data.name is missing; data.source hub needs it."),
        (
            "output_dir: a\nmodel: {build: {}}\ndata: {source: docstrings, packages: [no_such_package]}\n",
            "data.packages: No package named 'no_such_package' is installed.",
        ),
        (
            "output_dir: a\nmodel: {name_or_path: ./nowhere}\ndata: {source: hub, name: a}\n",
            "model.name_or_path must be a model on the Hub or a directory, but ./nowhere is not there.",
        ),
    ],
)
def test_a_bad_file_gets_one_sentence(content, sentence, tmp_path):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "bad.yaml")
    assert sentence in str(error.value)


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RecipeError, match="Cannot read the recipe .*none.yaml: No such file or directory."):
        load_recipe(tmp_path / "none.yaml")
