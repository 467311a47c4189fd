"""The README and docs/: tables are those of the committed results, links lead somewhere, the operator example runs."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "docs/across_devices.md"])
def test_tables_are_made_from_the_committed_results(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "update_readme", raising=False)
    from update_readme import updated

    text = (ROOT / name).read_text(encoding="utf-8")
    assert updated(name, text) == text, "run: python benchmarks/update_readme.py"


def test_the_operator_example_runs():
    examples = [code for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "maxsim(" in code]
    assert len(examples) == 1
    names: dict = {}
    exec(examples[0], names)
    assert names["scores"].shape == (4, 3) and names["pairs"].shape == (4, 1)


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
    assert len(lines) == 4
    for line in lines:
        arguments = launch_command_parser().parse_args(shlex.split(line))
        assert arguments.training_script == "pylate_fastmaxsim.cli" and arguments.module
        command, recipe = arguments.training_script_args
        assert command == "train" and (ROOT / recipe).is_file()


def headings(path):
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {title.lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(name):
    path = ROOT / name
    for target in re.findall(r"\]\((?!http)([^)]+)\)", path.read_text(encoding="utf-8")):
        file, _, heading = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists() and (not heading or heading in headings(found)), target
