import os
import subprocess
import sys

import pytest

from pylate_fastmaxsim.integrations import run_script
from pylate_fastmaxsim.integrations.enable import disable

pytest.importorskip("pylate")

SCRIPT = """
import os, sys
assert "transformers" not in sys.modules, "PyLate was imported before the script asked for it"
from pylate.scores import colbert_scores
print(__name__, sys.argv, sys.path[0] == os.path.dirname(os.path.realpath(__file__)))
print("accelerated", hasattr(colbert_scores, "__wrapped__"))
from pylate_fastmaxsim.integrations.options import current_options
print(current_options())
sys.exit(7)
"""


def run(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "pylate_fastmaxsim.run", *map(str, arguments)],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key != "PYLATE_FASTMAXSIM"} | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "folder" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def test_a_script_runs_accelerated_with_its_own_arguments(script, tmp_path):
    done = run("--compile", "--no-padding-free", "--ring", script, "--compile", "--lr", "1", "--", "x", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == [
        f"__main__ {[str(script), '--compile', '--lr', '1', '--', 'x']} True",
        "accelerated True",
        "Options(padding_free=False, compile=True, stock_masking=False, grad_filter=None, ring=True, fused_head=True)",
    ]
    assert done.stderr.count("accelerated: fused MaxSim") == 1


def test_own_code_may_be_said_to_treat_each_text_by_itself(script, tmp_path):
    assert "Options(padding_free='always'," in run("--padding-free", "always", script, cwd=tmp_path).stdout
    for words in (["--padding-free", "never"], ["--padding-free", "always", "--no-padding-free"]):
        refused = run(*words, script, cwd=tmp_path)
        assert refused.returncode == 2 and not refused.stdout and "--padding-free" in refused.stderr.splitlines()[-1]


def test_to_ask_whether_pylate_is_there_is_not_to_import_it(script, tmp_path):
    asks = "from importlib.util import find_spec\nassert find_spec('pylate')\nfind_spec('colpali_engine')\n"
    (tmp_path / "asks.py").write_text(asks)
    script.write_text(asks + SCRIPT)
    done = run(script, cwd=tmp_path)
    assert done.returncode == 7 and "accelerated True" in done.stdout, done.stderr
    assert "asks.py did not import PyLate" in run("asks.py", cwd=tmp_path).stderr


@pytest.mark.parametrize("error", ["ImportError('libX.so is missing')", "RuntimeError('no such operator')"])
def test_a_script_that_goes_on_without_a_broken_colpali_engine(error, script, tmp_path):
    (tmp_path / "stubs" / "colpali_engine").mkdir(parents=True)
    (tmp_path / "stubs" / "colpali_engine" / "__init__.py").write_text(f"raise {error}")
    script.write_text("try:\n    import colpali_engine\nexcept Exception:\n    pass\n" + SCRIPT)
    path = os.pathsep.join(filter(None, [str(tmp_path / "stubs"), os.environ.get("PYTHONPATH")]))
    done = run(script, cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 7, done.stderr
    assert "accelerated True" in done.stdout
    assert "PyLate" in done.stderr and done.stderr.count("accelerated: fused MaxSim") == 1
    assert f"colpali-engine cannot be imported: {error.partition('(')[0]}" in done.stderr


def test_a_module_runs_from_the_working_directory_unless_forbidden(script):
    done = run("-m", "train", "-m", cwd=script.parent, PYLATE_FASTMAXSIM="0")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == [
        f"__main__ {[str(script.resolve()), '-m']} True",
        "accelerated False",
        "None",
    ]


def test_a_pylate_that_is_loaded_already_is_accelerated(tmp_path, monkeypatch, capsys):
    # In this process, which has PyLate: what the launcher changes in it is put back.
    import pylate.scores  # noqa: F401

    (tmp_path / "quick.py").write_text(
        "from pylate_fastmaxsim.integrations.options import current_options; print(current_options())"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(run_script, "_show_log", lambda: None)
    monkeypatch.delenv("PYLATE_FASTMAXSIM", raising=False)
    try:
        run_script.run_script(["--stock-masking", "--no-fused-head", str(tmp_path / "quick.py")])
    finally:
        disable()
    assert (
        capsys.readouterr().out
        == "Options(padding_free=True, compile=False, stock_masking=True, grad_filter=None, ring=False, fused_head=False)\n"
    )


def test_an_exception_prints_the_script_s_own_traceback(tmp_path):
    (tmp_path / "fail.py").write_text("def f():\n    raise KeyError('gone')\nf()\n")
    done = run("fail.py", cwd=tmp_path)
    plain = subprocess.run([sys.executable, "fail.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == plain.returncode == 1
    first, _, traceback = done.stderr.partition("\n")
    assert "fail.py did not import PyLate" in first
    assert traceback == plain.stderr


@pytest.mark.parametrize("words", [["--"], ["--", "--", "x", "--"], ["x", "--"], []])
@pytest.mark.parametrize("begin", [["told.py"], ["-m", "told"], ["--ring", "told.py"], ["--", "told.py"]])
def test_every_word_behind_the_script_is_the_script_s(begin, words, tmp_path, monkeypatch):
    (tmp_path / "told.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(run_script, "_show_log", lambda: None)
    ran = []
    monkeypatch.setattr(run_script, "_run", ran.append)
    run_script.run_script([*begin, *words])
    assert ran[0].target in ("told.py", "told") and sys.argv == [ran[0].target, *words]


MAIN = """
import os, pickle, sys, threading, time
class Kept: pass
def later():
    time.sleep(0.5)
    print(pickle.loads(pickle.dumps(Kept())).__class__ is Kept)
threading.Thread(target=later).start()
import __main__
names = ("__file__", "__name__", "__package__", "__doc__", "__cached__", "__builtins__")
print([globals()[name] for name in names], __main__.Kept is Kept, type(__loader__).__name__, sys.argv, __spec__ and __spec__.name)
os.chdir("/")
"""


@pytest.mark.parametrize("words", [["inner/main.py", "x"], ["inner/../inner/main.py"], ["-m", "inner.main", "x"]])
def test_the_script_is_the_main_module_as_python_has_it_and_stays_it(words, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "main.py").write_text(MAIN)
    plain = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert plain.stdout.endswith("\nTrue\n")
    assert run(*words, cwd=tmp_path).stdout == plain.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent.py"], "there is no script 'absent.py'."),
        (["-m", "absent_module"], "there is no module 'absent_module'."),
        (["-m", "absent.module"], "there is no module 'absent.module'."),
        ([], "name what to run: SCRIPT.py, or -m MODULE."),
    ],
)
def test_nothing_to_run_is_one_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_script.run_script(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"fastmaxsim run: {sentence}\n"


def test_a_module_that_misses_another_says_which(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import absent_module")
    (tmp_path / "package" / "inner.py").write_text("")
    done = run("-m", "package.inner", cwd=tmp_path)
    assert done.returncode == 1 and "no module 'package.inner'" not in done.stderr
    assert "No module named 'absent_module'" in done.stderr.splitlines()[-1]


def test_a_nonsense_switch_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("PYLATE_FASTMAXSIM", "maybe")
    with pytest.raises(SystemExit, match="2"):
        run_script.run_script(["absent.py"])
    assert "PYLATE_FASTMAXSIM must be" in capsys.readouterr().err


def test_an_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        run_script.run_script(["--fast", "train.py"])
    assert "--fast" in capsys.readouterr().err
