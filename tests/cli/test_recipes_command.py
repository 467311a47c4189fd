import json
import os
import subprocess
import sys

import pytest

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import describe, is_recipe, load_recipe, plain_values, shipped_recipes
from tests.support.case_tables import case_table
from tests.support.command_line import fastmaxsim
from tests.support.paths import RECIPES, ROOT
from tests.support.tiny_recipe import few_steps


def test_every_recipe_is_listed_with_one_line_of_its_own():
    files = sorted(RECIPES.rglob("*.yaml"))
    assert list(shipped_recipes()) == sorted(file.stem for file in files)  # no two have one name
    lines = fastmaxsim(["recipes"]).output.splitlines()
    assert fastmaxsim(["recipes", "list"]).output.splitlines() == lines
    assert fastmaxsim(["recipes", "show", "quickstart"]).stdout == (RECIPES / "quickstart.yaml").read_text()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    for file in files:
        # A sentence that went on in the next line would be cut.
        assert len(describe(file)) > 20 and file.read_text().splitlines()[0].endswith(":"), file


def test_a_recipe_is_found_by_name_behind_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart") == load_recipe(RECIPES / "quickstart.yaml")
    done = fastmaxsim(["recipes", "copy", "quickstart", "mine"])
    assert (done.exit_code, done.stdout) == (0, "mine/quickstart.yaml\n")
    copy = tmp_path / "mine" / "quickstart.yaml"
    copy.write_text(copy.read_text().replace("runs/quickstart", "elsewhere"))
    assert load_recipe("quickstart").output_dir == "runs/quickstart"
    monkeypatch.chdir(copy.parent)
    assert load_recipe("quickstart").output_dir == "elsewhere"
    done = fastmaxsim(["recipes", "copy", "quickstart"])
    assert (done.exit_code, done.stderr) == (2, "fastmaxsim: quickstart.yaml cannot be written: File exists.\n")
    (tmp_path / "quickstart").mkdir()
    assert is_recipe("mine.yaml") and is_recipe("quickstart") and not is_recipe("some/model")
    monkeypatch.chdir(tmp_path)
    assert not is_recipe("quickstart")  # a model in this folder


def test_the_schema_has_the_keys_of_every_recipe():
    schema = json.loads(fastmaxsim(["recipes", "schema"]).stdout)

    def known(value: object, of: dict) -> bool:
        options = [schema["$defs"][each["$ref"].split("/")[-1]] for each in of.get("anyOf", [of]) if "$ref" in each]
        if not isinstance(value, dict) or not options:
            return True
        keys = options[0]["properties"]
        return value.keys() <= keys.keys() and all(known(each, keys[name]) for name, each in value.items())

    of_kind = {
        each["if"]["properties"]["model"]["properties"]["kind"]["const"]: each["then"] for each in schema["allOf"]
    }
    for name in shipped_recipes():
        recipe = load_recipe(name)
        values = plain_values(recipe)
        assert known(values, of_kind[recipe.model.kind])
        assert not known(values | {"training": {"lr": 1}}, of_kind[recipe.model.kind])
    keys = schema["$defs"]["LateTraining"]["properties"]
    assert "push_to_hub" in keys and "output_dir" not in keys and keys["seed"]["maximum"] == 2**32 - 1


@case_table("""
name | sentence
quickstar | there is no recipe quickstar; did you mean .quickstart..
nothing | there is no recipe nothing; the package has
recipes/quickstart.yaml | there is no file recipes/quickstart.yaml; to run .* write quickstart.
other.yaml | Cannot read the recipe other.yaml:
""")
def test_a_recipe_that_is_not_there_gets_one_sentence(name, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=sentence):
        load_recipe(name)
    assert "there is no recipe x; the package has" in fastmaxsim(["recipes", "copy", "x"]).stderr


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_a_wheel_holds_the_recipes(tmp_path):
    pytest.importorskip("hatchling", reason="builds the wheel")
    pytest.importorskip("pylate")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT]
    subprocess.run([*pip, *build], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "installed", wheel], check=True, timeout=120)
    (tmp_path / "work").mkdir()

    program = "from pylate_fastmaxsim import cli\nassert 'installed' in cli.__file__\ncli.main()"
    options = {"cwd": tmp_path / "work", "env": {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}}
    options |= {"capture_output": True, "text": True, "timeout": 300}

    def installed(*arguments):
        return subprocess.run([sys.executable, "-c", program, *arguments], **options)

    assert installed("recipes").stdout == fastmaxsim(["recipes"]).output
    few = few_steps("runs/x", "data={source: docstrings, packages: [numpy], max_rows: 40}", "evaluation.rows=0")
    few.append("model.build={vocab_size: 512, hidden_size: 16, num_hidden_layers: 1, intermediate_size: 16}")
    done = installed("train", "quickstart", *(f"--set={each}" for each in few))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work" / "runs" / "x" / "model").is_dir()
