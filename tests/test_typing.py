"""A type checker sees the signatures of the public names, which are loaded on first use."""

import re
import subprocess
import sys

import pytest

import pylate_fastmaxsim
from tests.support.paths import ROOT

pytest.importorskip("mypy")

CALLS = """
import pylate_fastmaxsim
pylate_fastmaxsim.enable(padding_free="always", compile=True)
with pylate_fastmaxsim.enabled(padding_fre=True): pass  # ERROR
pylate_fastmaxsim.maxsims  # ERROR
pylate_fastmaxsim.BM25(k=1)  # ERROR
"""


@pytest.mark.process
def test_wrong_calls_are_refused_every_name_has_a_type_and_examples_are_right(tmp_path):
    names = pylate_fastmaxsim.__all__
    text = "\n".join([CALLS.strip(), *(f"reveal_type(pylate_fastmaxsim.{name})" for name in names)])
    (tmp_path / "script.py").write_text(text)
    # To read the libraries takes a minute, and their types are not what is asked.
    ours = "[mypy-pylate_fastmaxsim,pylate_fastmaxsim.*]\nfollow_imports = normal\n"
    others = "[mypy]\ncache_dir = cache\nfollow_imports = skip\nignore_missing_imports = true\n"
    (tmp_path / "mypy.ini").write_text(others + ours)
    command = [sys.executable, "-m", "mypy", "--check-untyped-defs", "script.py", str(ROOT / "examples")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    wrong = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# ERROR")]
    assert [int(number) for number in re.findall(r"^script.py:(\d+): error", done.stdout, re.MULTILINE)] == wrong
    assert done.stdout.count(": error: ") == len(wrong), done.stdout
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    untyped = [name for name, type_ in zip(names, revealed, strict=True) if type_ == "Any"]
    # It has a decorator of torch, which is not read.
    assert untyped == ["sparse_search"], done.stdout
