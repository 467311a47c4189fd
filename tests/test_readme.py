"""The README and docs/: tables are those of the committed results, links lead somewhere, examples run, names exist."""

from __future__ import annotations

import inspect
import json
import re
import shlex

import pytest
import torch
from paths import ROOT

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.enable import available_patches

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "docs/measurements.md", "docs/across_devices.md"])
def test_tables_are_made_from_the_committed_results(name):
    from benchmarks.update_readme import updated

    text = (ROOT / name).read_text(encoding="utf-8")
    assert updated(name, text) == text, "run: python -m benchmarks.update_readme"


def test_the_operator_example_runs():
    examples = [code for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "maxsim(" in code]
    assert len(examples) == 1
    names: dict = {}
    exec(examples[0], names)
    assert names["scores"].shape == (4, 3) and names["pairs"].shape == (4, 1)


def test_the_script_with_the_flag_trains(encoder, monkeypatch, tmp_path):
    pytest.importorskip("pylate")
    pytest.importorskip("datasets")
    script = README.partition("## The flag")[2].partition("```python\n")[2].partition("```")[0]
    for here, there in (
        ('"answerdotai/ModernBERT-base"', repr(encoder("modernbert"))),
        ("bf16=True", f"bf16=True, use_cpu={not torch.cuda.is_available()}"),
    ):
        assert here in script
        script = script.replace(here, there)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    try:
        exec(script, names)
    finally:
        pylate_fastmaxsim.disable()
    assert names["trainer"].state.global_step == 1


def test_options_are_those_of_enable():
    table = README.partition("| option of `enable()` |")[2].partition("\n\n")[0]
    written = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", table, flags=re.MULTILINE)
    parameters = inspect.signature(pylate_fastmaxsim.enable).parameters.values()
    assert written == [(parameter.name, str(parameter.default)) for parameter in parameters]


def test_what_is_patched_is_named():
    pytest.importorskip("pylate")
    named = re.findall(r"`(?:\w+\.)?(\w+)`", README.partition("`enable()` patches:")[2].partition("\n\n")[0])
    for patch in available_patches():
        of_class = isinstance(patch.owner, type)
        if (patch.owner.__module__ if of_class else patch.owner.__name__).startswith("pylate."):
            assert (patch.owner.__name__ if of_class else patch.name) in named


def test_commands_of_the_benchmarks_take_their_options():
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"`python -m (benchmarks[\w.]+)([^`]*)`", text)
    assert len(commands) > 10
    taken = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").rglob("*.py"))
    for script, arguments in commands:
        assert (ROOT / f"{script.replace('.', '/')}.py").is_file()
        for option in re.findall(r"--[a-z][a-z-]+", arguments):
            assert f'"{option}"' in taken or "long_documents" in script, (script, option)


def test_every_trial_is_listed_by_its_key():
    trials = json.loads((ROOT / "benchmarks" / "results" / "kernel_trials.json").read_text())
    table = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").partition("| key | figures |")[2]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", table, flags=re.MULTILINE)))
    assert sorted(listed) == sorted(trials.keys() - {"environment", "note"})


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
    table = README.partition("| encoder | layer to wrap |")[2].partition("\n\n")[0]
    layers = re.findall(r"\| `(\w+)` \|", table)
    for module, layer in zip(modules, layers, strict=True):
        assert issubclass(getattr(module, layer), torch.nn.Module)
    lines = re.findall(r"^accelerate launch (.+)$", README, flags=re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        arguments = launch_command_parser().parse_args(shlex.split(line))
        assert arguments.training_script == "pylate_fastmaxsim.cli" and arguments.module
        command, recipe = arguments.training_script_args
        assert command == "train" and (ROOT / recipe).is_file()


def headings(path):
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    # As GitHub names them: without punctuation.
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


DOCUMENTS = [
    "README.md",
    "benchmarks/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    path = ROOT / name
    for target in re.findall(r"\]\((?!http)([^)]+)\)", path.read_text(encoding="utf-8")):
        file, _, heading = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists() and (not heading or heading in headings(found)), target
