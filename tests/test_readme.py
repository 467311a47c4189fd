"""README and docs/: tables are those of the committed results, generated parts those of the code, and links and names lead somewhere."""

import ast
import importlib
import inspect
import json
import re
import shlex

import pytest
import torch

import pylate_fastmaxsim
from benchmarks.harness.paths import RESULTS
from benchmarks.harness.suite import SUITES
from benchmarks.training import train_step
from pylate_fastmaxsim.cli import COMMANDS
from pylate_fastmaxsim.integrations.hosts import find_replacements
from pylate_fastmaxsim.integrations.options import OPTIONS
from tests.support.examples import PAGES
from tests.support.paths import ROOT
from tools.references import log_lines, quoted_lines, updated

README = PAGES["README.md"]
EVERYTHING = "\n".join(text for name, text in PAGES.items() if name != "CHANGELOG.md")
CODE = {language: re.findall(rf"```{language}\n(.*?)```", EVERYTHING, flags=re.DOTALL) for language in ("bash", "yaml")}


def test_pages_are_read_to_their_end():
    assert len(README.encode()) <= 13_000
    docs = [text.encode() for name, text in PAGES.items() if name.startswith("docs/")]
    assert len(docs) <= 16 and sum(map(len, docs)) <= 200_000


def test_tables_are_made_from_the_committed_results():
    from benchmarks.documents import tables
    from benchmarks.harness.tables import replace_marked

    made = tables()
    for name, page in PAGES.items():
        assert sorted(re.findall(r"<!-- (\w\S+-table) -->", page)) == sorted(made.get(name, ())), name
        assert name not in made or replace_marked(name, page, made[name]) == page, "run: python -m benchmarks --render"


def test_the_picture_is_drawn_of_the_committed_results(tmp_path):
    train_step.plot(json.loads((RESULTS / "train_step.json").read_text()), tmp_path / "train_step.json")
    assert {path.name for path in tmp_path.iterdir()} == {"train_step.png", "train_step_checkpointing.png"}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", PAGES[name]):
        file, _, heading = target.partition("#")
        found = ((ROOT / name).parent / file).resolve() if file else ROOT / name
        assert found.exists(), target
        if heading:
            # As GitHub names them: without punctuation.
            titles = re.findall(r"^#+ (.+)$", PAGES[str(found.relative_to(ROOT))], flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in titles}, target


def test_files_that_are_named_exist():
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    for file in re.findall(r"`([\w/<>]+\.py)`", EVERYTHING):
        assert any(each.endswith(f"/{file}") for each in files) or file == "train.py", file


def test_commands_that_are_named_exist():
    assert set(re.findall(r"`fastmaxsim (\w+)", README)) == set(COMMANDS)
    assert set(re.findall(r"[`/\n]fastmaxsim (\w+)", EVERYTHING)) == set(COMMANDS)
    for script in re.findall(r"`python ([\w/]+\.py)", EVERYTHING):
        assert (ROOT / script).is_file(), script
    suites = re.findall(r"python -m benchmarks (\w+)([^`\n]*)", EVERYTHING)
    taken = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").rglob("*.py"))
    assert len(suites) > 10
    for module, arguments in suites:
        assert module in {*SUITES, "SUITE"}, module
        for option in re.findall(r"--[a-z][a-z-]+", arguments):
            assert f'"{option}"' in taken, (module, option)


def test_options_are_those_of_enable():
    options = {option.name: (option.type, option.default) for option in OPTIONS}
    for function in (pylate_fastmaxsim.enable, pylate_fastmaxsim.enabled):
        parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "quiet"]
        found = {each.name: (each.annotation.removesuffix(" | str"), each.default) for each in parameters}
        assert found == options
    described = inspect.getdoc(pylate_fastmaxsim.enable).partition("Parameters\n")[2].partition("Returns\n")[0]
    assert re.findall(r"^(\w+)$", described, flags=re.MULTILINE) == [*options, "quiet"]


def test_what_is_patched_is_named():
    pytest.importorskip("pylate")
    section = PAGES["docs/pylate.md"].partition("## What `enable()` patches")[2].partition("\n## ")[0]
    named = re.findall(r"`(?:\w+\.)?(\w+)`", section)
    for patch in (each.patch for each in find_replacements() if each.left is None):
        of_class = isinstance(patch.owner, type)
        if (patch.owner.__module__ if of_class else patch.owner.__name__).startswith("pylate."):
            assert (patch.owner.__name__ if of_class else patch.name) in named


def test_layers_to_wrap_are_those_of_transformers():
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import launch_command_parser

    page = PAGES["docs/recipes.md"]
    layers = re.findall(r"\| `(\w+)` \|", page.partition("| encoder | layer to wrap |")[2].partition("\n\n")[0])
    for name, layer in zip(("modernbert", "bert", "xlm_roberta", "qwen2_vl", "gemma"), layers, strict=True):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        assert issubclass(getattr(module, layer), torch.nn.Module)
    lines = re.findall(r"^accelerate launch (.+)$", page, flags=re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        arguments = launch_command_parser().parse_args(shlex.split(line))
        assert arguments.training_script == "pylate_fastmaxsim.cli" and arguments.module
        command, recipe = arguments.training_script_args
        assert command == "train" and (ROOT / recipe).is_file()


def test_command_lines_of_pages_are_parsed():
    from pylate_fastmaxsim.cli import command_parser
    from pylate_fastmaxsim.comparison.script_child import script_comparison_parser

    lines = re.findall(r"^fastmaxsim (\w+) ?(.*)$", "\n".join(CODE["bash"]), flags=re.MULTILINE)
    assert len(lines) > 5
    for name, arguments in lines:
        if ".py" in arguments:
            script_comparison_parser("compare").parse_args(shlex.split(arguments))
        else:
            command_parser(name).parse_intermixed_args(shlex.split(arguments))


def test_sections_of_recipes_in_pages_are_valid():
    import yaml

    from pylate_fastmaxsim.recipes.config.kinds import build_recipe

    mining = {"pairs": {"source": "files", "files": ["pairs.jsonl"]}, "teacher": "teacher"}
    data = {"source": "docstrings", "packages": ["torch"]}
    assert len(CODE["yaml"]) > 4
    for code in CODE["yaml"]:
        sections = yaml.safe_load(code)
        if "mining" in sections:
            sections["mining"] = mining | sections["mining"]
        model = {"model": {"name_or_path": "bert"}}
        build_recipe({"name": "page", "output_dir": "page", "data": data, **model, **sections})


def test_generated_parts_are_those_of_the_code():
    for path, text in updated().items():
        assert text == path.read_text(encoding="utf-8"), "run: python -m tools.references"


def test_each_argument_has_a_meaning():
    table = PAGES["docs/reference.md"].partition("<!-- commands -->")[2].partition("<!-- /commands -->")[0]
    rows = re.findall(r"^\| (.*?) \| ?(.*?) ?\|$", table, flags=re.MULTILINE)
    assert len(rows) > 40 and all(meaning for _, meaning in rows), rows


def test_each_line_of_log_is_quoted_whole_and_has_a_meaning():
    quoted = quoted_lines(PAGES["docs/limits.md"])
    assert len(log_lines()) > 40
    for line in log_lines():
        assert quoted.count(line) == 1, line
    for row in re.findall(r"^\| `.+$", PAGES["docs/limits.md"], flags=re.MULTILINE):
        _, why, what_to_do = row.removesuffix("|").split(" |")[:3]
        assert why.strip() or what_to_do.strip(), row


def test_what_is_quoted_is_in_the_code():
    """Reasons and errors too, which are no lines of log of their own; ... stands for names."""
    texts = [
        node.value
        for file in (ROOT / "pylate_fastmaxsim").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    whole = set(log_lines())
    for part in (
        part.strip()
        for line in quoted_lines(PAGES["docs/limits.md"])
        if line not in whole
        for part in line.split("...")
    ):
        assert any(part in text for text in texts), part
