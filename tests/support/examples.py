"""The pages of documentation, and their examples: blocks of code below ``<!-- example: NAME -->``, which tests run."""

import re
from collections.abc import Mapping

import torch

from tests.support.paths import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}


def example(name: str, replaced: Mapping[str, str] | None = None) -> str:
    """The code of an example, with what is ``replaced``, as the names of models by folders; all of that must be in it."""
    found = [
        code
        for text in PAGES.values()
        for code in re.findall(rf"<!-- example: {re.escape(name)} -->\n```\w+\n(.*?)```", text, flags=re.DOTALL)
    ]
    assert len(found) == 1, f"{len(found)} examples are named {name}"
    [code] = found
    for here, there in (replaced or {}).items():
        assert here in code, here
        code = code.replace(here, there)
    return code


def training_example(name: str, model: str, stand_in: str, device: str | None = None) -> str:
    """The code of an example that trains in bf16, with a stand-in for its model, on a GPU if there is one."""
    on_cpu = device == "cpu" if device else not torch.cuda.is_available()
    return example(name, {f'"{model}"': repr(stand_in), "bf16=True": f"bf16=True, use_cpu={on_cpu}"})
