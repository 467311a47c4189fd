import os
import re
import subprocess
import sys

import pytest

from pylate_fastmaxsim import TopK
from pylate_fastmaxsim.integrations import run_script

pytest.importorskip("pylate")

SCRIPT = """
import os, sys, importlib.util, multiprocessing

class Kept:
    pass

def work(kept):
    return type(kept).__name__

if __name__ == "__main__":
    assert importlib.util.find_spec("pylate") and "transformers" not in sys.modules
    os.environ["HF_HOME"] = "/of/the/script"
    from pylate.scores import colbert_scores
    from huggingface_hub.constants import HF_HOME
    from pylate_fastmaxsim.integrations.options import current_options
    print(sys.argv[1:], sys.path[0], HF_HOME)
    print(hasattr(colbert_scores, "__wrapped__"), current_options())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [Kept()]))
    sys.exit(7)
"""


@pytest.mark.process
def test_a_script_runs_accelerated(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "pylate_fastmaxsim.run", "--stock-masking", "--no-padding-free"]
    command += ["-m", "train", "--stock-masking", "--", "x"]
    environment = {key: value for key, value in os.environ.items() if key != "PYLATE_FASTMAXSIM"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    words, options, spawned = done.stdout.splitlines()
    assert words == f"['--stock-masking', '--', 'x'] {tmp_path} /of/the/script"
    assert options.startswith("True Options(padding_free=False,") and "stock_masking=True" in options
    assert spawned == "['Kept']"
    assert done.stderr.count("accelerated: fused MaxSim") == 1


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(run_script, "show_log", lambda: None)
    return run_script.run_script


@pytest.mark.parametrize(
    ("first_host", "script", "hosts"),
    [
        ("import second_host", "import first_host, second_host", [["first_host", "second_host"]]),
        ("raise ImportError", "try:\n import first_host\nexcept ImportError:\n import second_host", [["second_host"]]),
        ("", "import importlib.util\nassert importlib.util.find_spec('first_host')", []),
    ],
)
def test_enable_is_called_once_a_host_is_there(run, tmp_path, monkeypatch, caplog, first_host, script, hosts):
    for name, text in (("first_host", first_host), ("second_host", ""), ("train", script)):
        (tmp_path / f"{name}.py").write_text(text)
    names, calls = {"first_host", "second_host"}, []
    monkeypatch.setattr(run_script, "HOST_PACKAGES", names)
    monkeypatch.setattr(run_script, "contains_host", lambda name: True)
    monkeypatch.setattr(run_script, "enable", lambda **given: calls.append((given, sorted(names & sys.modules.keys()))))
    run(["--padding-free", "always", "--compile", "--pooling", "top_k=4", "train.py"])
    for name in names:
        sys.modules.pop(name, None)
    options = {"padding_free": "always", "compile": True, "pooling": TopK(4), "quiet": True}
    assert calls == [(options, loaded) for loaded in hosts]
    assert ("Nothing was accelerated" in caplog.text) == (not hosts)


def test_an_exception_prints_the_script_s_own_traceback(run, tmp_path, capsys):
    (tmp_path / "fail.py").write_text("def f():\n    raise KeyError('gone')\nf()\n")
    plain = subprocess.run([sys.executable, "fail.py"], cwd=tmp_path, capture_output=True, text=True)
    with pytest.raises(SystemExit) as stopped:
        run(["fail.py"])
    assert stopped.value.code == plain.returncode == 1
    assert capsys.readouterr().err == plain.stderr


@pytest.mark.parametrize("words", [["--", "--stock-masking", "x", "--"], []])
@pytest.mark.parametrize("begin", [["-m", "told"], ["--stock-masking", "told.py"], ["--", "told.py"]])
def test_every_word_behind_the_script_is_the_script_s(run, begin, words, monkeypatch):
    ran = []
    monkeypatch.setattr(run_script, "run_as_main", lambda *arguments: ran.append(arguments))
    run([*begin, *words])
    assert ran == [([begin[-1], *words], "-m" in begin)]


POOLING = "pooling must be max, top_k=K, softmax=T or log_sum_exp=T, with K from 1 and T above 0, got "
NOTHING = [
    (["absent.py"], "No such file or directory: .*absent.py"),
    (["-m", "absent.module"], "No module named 'absent'"),
    ([], "name what to run: SCRIPT.py, or -m MODULE"),
    (["--fast", "told.py"], "--fast"),
    (["--padding-free", "always", "--no-padding-free", "told.py"], "--padding-free"),
]
NOTHING += [
    (["--pooling", text, "train.py"], f"{POOLING}'{text}'")
    for text in ("top_k=0", "top_k=2.5", "top_k", "softmax=-1", "mean", "max=1")
]


@pytest.mark.parametrize("arguments, error", NOTHING)
def test_nothing_to_run_is_one_sentence(run, arguments, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(arguments)
    usage, sentence = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: fastmaxsim run [options]")
    assert re.search(error, sentence)
