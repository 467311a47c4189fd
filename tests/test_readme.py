"""README and docs/: tables are those of the committed results, links and names lead somewhere, examples run."""

from __future__ import annotations

import inspect
import re
import shlex

import pytest
import torch

import pylate_fastmaxsim
from benchmarks.harness.suite import SUITES
from pylate_fastmaxsim.cli import COMMANDS
from pylate_fastmaxsim.integrations.hosts import find_replacements
from pylate_fastmaxsim.integrations.options import OPTIONS
from tests.support.examples import PAGES
from tests.support.paths import ROOT

README = PAGES["README.md"]
EVERYTHING = "\n".join(text for name, text in PAGES.items() if name != "CHANGELOG.md")
CODE = {language: re.findall(rf"```{language}\n(.*?)```", EVERYTHING, flags=re.DOTALL) for language in ("bash", "yaml")}


def test_the_readme_is_read_to_its_end():
    assert len(README.encode()) <= 13_500


def test_docs_are_at_most_sixteen_pages_and_200_kb():
    pages = [text for name, text in PAGES.items() if name.startswith("docs/")]
    assert len(pages) <= 16 and sum(len(text.encode()) for text in pages) <= 200_000


def test_tables_are_made_from_the_committed_results():
    from benchmarks.documents import tables, updated

    made = tables()
    marks = {name: re.findall(r"<!-- (\w\S+-table) -->", text) for name, text in PAGES.items()}
    assert {name: sorted(found) for name, found in marks.items() if found} == {
        name: sorted(made[name]) for name in made
    }
    for name in made:
        assert updated(name, PAGES[name], made[name]) == PAGES[name], "run: python -m benchmarks --render"


def headings(name: str) -> set[str]:
    # As GitHub names them: without punctuation.
    titles = re.findall(r"^#+ (.+)$", PAGES[name], flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", PAGES[name]):
        file, _, heading = target.partition("#")
        found = ((ROOT / name).parent / file).resolve() if file else ROOT / name
        assert found.exists(), target
        assert not heading or heading in headings(str(found.relative_to(ROOT))), target


def test_files_that_are_named_exist():
    files = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    for name in (name for name in PAGES if name != "CHANGELOG.md"):
        for file in re.findall(r"`([\w/<>]+\.py)`", PAGES[name]):
            assert any(each.endswith(f"/{file}") for each in files) or file in ("train.py",), (name, file)


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


def test_every_trial_is_listed_by_its_key():
    from benchmarks.harness.records import load

    trials = load(ROOT / "benchmarks" / "results" / "kernel_trials.json")
    table = PAGES["benchmarks/README.md"].partition("| key | figures |")[2]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", table, flags=re.MULTILINE)))
    assert sorted(listed) == sorted(trials.keys() - {"environment", "note"})


def test_options_are_those_of_enable():
    options = {option.name: (option.type, option.default) for option in OPTIONS}
    for function in (pylate_fastmaxsim.enable, pylate_fastmaxsim.enabled):
        parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "quiet"]
        assert {each.name: (each.annotation, each.default) for each in parameters} == options
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
    """And the launcher takes every option of the lines to paste."""
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import launch_command_parser
    from transformers.models.bert import modeling_bert
    from transformers.models.gemma import modeling_gemma
    from transformers.models.modernbert import modeling_modernbert
    from transformers.models.qwen2_vl import modeling_qwen2_vl
    from transformers.models.xlm_roberta import modeling_xlm_roberta

    modules = (modeling_modernbert, modeling_bert, modeling_xlm_roberta, modeling_qwen2_vl, modeling_gemma)
    page = PAGES["docs/recipes.md"]
    layers = re.findall(r"\| `(\w+)` \|", page.partition("| encoder | layer to wrap |")[2].partition("\n\n")[0])
    for module, layer in zip(modules, layers, strict=True):
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
        words = shlex.split(arguments)
        parser = script_comparison_parser("compare") if ".py" in arguments else command_parser(name)
        parser.parse_args(words) if ".py" in arguments else parser.parse_intermixed_args(words)


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
