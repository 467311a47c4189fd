import json
import signal
import subprocess
import sys
import time

import pytest

from tests.support.paths import RECIPES

pytest.importorskip("pylate")

import pylate_fastmaxsim
from pylate_fastmaxsim.recipes.training import train as training
from tests.support.case_tables import case_table
from tests.support.command_line import fastmaxsim
from tests.support.tiny_recipe import tiny, write


def launched(*arguments, code=""):
    """Run the command in a process of its own, after ``code``."""
    code = f"import sys\nsys.argv[0] = 'fastmaxsim'\n{code}\nfrom pylate_fastmaxsim.cli import main\nmain()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_version_and_help():
    assert fastmaxsim(["--version"]).output == f"pylate-fastmaxsim {pylate_fastmaxsim.__version__}\n"
    listed = fastmaxsim(["--help"]).output
    assert all(command in listed for command in ("train", "mine", "compare", "robustness", "search", "warmup"))
    for command in ("compare", "doctor"):
        shown = fastmaxsim([command, "--help"])  # of a recipe, and of a script
        assert (shown.exit_code, shown.stderr) == (0, "")
        assert "--set KEY=VALUE" in shown.stdout and "(SCRIPT.py | -m MODULE)" in shown.stdout


def test_a_shell_completes_commands_options_and_recipes():
    script = fastmaxsim(["completion", "bash"]).stdout
    given = {"ro": "robustness", "train --re": "--resume", "mine quic": "quickstart"}
    for words, expected in (given | {"compare --s": "--set --sweep --stock-masking --steps"}).items():
        code = f"{script}\nCOMP_WORDS=(fastmaxsim {words}); COMP_CWORD={len(words.split())}; _fastmaxsim\n"
        done = subprocess.run(["bash", "-c", code + 'echo "${COMPREPLY[*]}"'], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (f"{expected}\n", "")
    assert fastmaxsim(["completion", "zsh"]).stdout.endswith(script)
    assert " mine' -a '--help colbert_" in fastmaxsim(["completion", "fish"]).stdout


# Commands whose only line names what is wrong with them, and which leave nothing behind.
@case_table("""
arguments | said
train RECIPE --set training.max_step=3 | training.max_step
compare RECIPE --set data.columns=[query,document] | data.columns
train LONG.yaml |
compare RECIPE --output LONG |
mine RECIPE --set output_dir=LONG |
search FOLDER --corpus LONG.jsonl --queries LONG.jsonl |
evaluate LONG --beir LONG --json LONG |
doctor FOLDER/absent | MODEL: there is no folder
doctor FOLDER --set fast.compil=true | fast.compil
compare RECIPE --sweep batch_size=8,x | --sweep batch_size=8,x: write it as batch_size=64,256,1024
compare RECIPE --sweep batch_size=0 | --sweep batch_size=0: write it as
robustness RECIPE | RECIPE: there is no model in
robustness ./nowhere --beir data | MODEL: there is no folder ./nowhere
robustness a/model | a/model needs held-out data
robustness a/model --beir data --set name=a | --set overrides a key of a recipe
WORLD_SIZE=2 compare RECIPE | compare measures on one device; start it without a distributed launcher.
warmup | warmup needs a
warmup RECIPE --shape 1x1x1x1 | warmup needs a
warmup --shape 128x32x256 | --shape 128x32x256: write it as 128x32x256x300[
warmup --shape 1x2x3x4,dtype=float17 | --shape 1x2x3x4,dtype=float17: write it as
warmup --shape 1x2x3x4,formats=int8+int4 | --shape 1x2x3x4,formats=int8+int4: write it as
warmup --shape 128x32x256x300,dim=96,formats=int8 | warmup: kernels are compiled for the GPU that will run them
WORLD_SIZE=2 warmup RECIPE
  | warmup needs one process, whose cache all of them share; start it without a launcher.
""")
@pytest.mark.usefixtures("forked")
def test_bad_input_is_one_line_with_exit_code_2(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write(tmp_path, tiny(tmp_path))
    (tmp_path / "model").mkdir()
    for name, value in {"RECIPE": recipe, "FOLDER": tmp_path, "LONG": tmp_path / ("x" * 300)}.items():
        arguments, said = arguments.replace(name, str(value)), said.replace(name, str(value))
    variables, _, arguments = arguments.rpartition("=2 ")
    done = fastmaxsim(arguments.split(), env=dict.fromkeys(variables.split(), "2"))
    assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.output
    assert done.stderr.startswith(f"fastmaxsim: {said}") and not done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", ["search model --json --no-exact", "train a --set --resume", "mine x --set --"])
def test_an_option_is_not_the_value_of_another(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = fastmaxsim(arguments.split())
    assert done.exit_code == 2 and not list(tmp_path.iterdir())
    assert f"argument {arguments.split()[2]}: expected one argument" in done.stderr


def test_train_says_what_was_in_force_and_why(tmp_path):
    file = write(tmp_path, tiny(tmp_path, training={"max_steps": 1}, fast={"enabled": True}))
    off = "PYLATE_FASTMAXSIM=0"
    for value, why_off, shown in (("0", off, f"off ({off})"), ("1", None, "on (grouped)")):
        arguments = ["train", file, "--set", "name=my-run", "--no-resume"]
        done = fastmaxsim(arguments, env={"PYLATE_FASTMAXSIM": value}, code=0)
        assert "my-run: trained" in done.stdout and "nDCG@10" in done.stdout
        # Before and after the training.
        rows = [line.strip("│ ").split("│")[1].strip() for line in done.stdout.splitlines() if "fastmaxsim" in line]
        assert rows == [shown.partition(" ")[0], shown] and "36, 24 to evaluate on" in done.stdout
        fast = json.loads((tmp_path / "out" / "train.json").read_text())["fast"]
        assert (fast["enabled"], fast["why_off"]) == (why_off is None, why_off)
    done = fastmaxsim(["train", file], env={"PYLATE_FASTMAXSIM": "maybe"}, code=2)
    assert done.stderr.startswith("fastmaxsim: PYLATE_FASTMAXSIM must be 1, true, ") and not done.stdout


def test_names_and_paths_stand_whole_and_as_they_are(tmp_path):
    folder = tmp_path / "rows[1]"
    folder.mkdir()
    recipe = tiny(folder, "lr[=1e-3] :x:", training={"max_steps": 1, "save_steps": None}) | {"name": "[/x] :smiley:"}
    file = write(folder, recipe)
    done = fastmaxsim(["train", file], code=0)
    # Off a terminal no line ends at its width; brackets and colons mean nothing.
    assert "[/x] :smiley:: trained" in done.stdout and str(folder / "lr[=1e-3] :x:" / "model") in done.stdout
    done = fastmaxsim(["train", file, "--set", "data.columns=[':x:', b]"])
    assert "no column ':x:'" in done.stderr


@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_an_interrupt_keeps_a_checkpoint_and_says_how_to_go_on(tmp_path, monkeypatch):
    file = write(tmp_path, tiny(tmp_path, training={"max_steps": 100_000, "save_steps": 20}))
    command = [sys.executable, "-m", "pylate_fastmaxsim.cli", "train", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    last = errors.strip().splitlines()[-1]
    assert last.startswith(f"Interrupted: {tmp_path}/out/checkpoint-") and "goes on from there" in last
    assert "Traceback" not in errors
    # The same command with --no-resume would remove the checkpoint.
    monkeypatch.setattr(training, "train", lambda *arguments: signal.raise_signal(signal.SIGINT))
    done = fastmaxsim(["train", file, "--no-resume"])
    assert done.exit_code == 130 and "the same command without --no-resume goes on from there" in done.stderr


@pytest.mark.process
def test_an_interrupt_while_modules_are_imported_is_one_line(tmp_path):
    code = """
import builtins
load = builtins.__import__
def interrupted(name, *rest, **more):
    if name == "yaml":
        raise KeyboardInterrupt
    return load(name, *rest, **more)
builtins.__import__ = interrupted
"""
    done = launched("train", write(tmp_path, tiny(tmp_path)), code=code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nInterrupted.\n")


@pytest.mark.process
@pytest.mark.usefixtures("forked")
@case_table("""
missing | said
yaml | yaml is
sentence_transformers | sentence_transformers is
pylate | model.kind colbert needs
""")
def test_without_the_recipes_extra_it_says_what_to_install(missing, said):
    done = launched("train", RECIPES / "quickstart.yaml", code=f"sys.modules['{missing}'] = None")
    assert done.returncode in (1, 2) and done.stderr.count("\n") == 1
    assert f"fastmaxsim: {said}" in done.stderr and '"pylate<2,>=1.5.1"' in done.stderr


@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_run_and_doctor_work_without_the_recipes_extra(tmp_path):
    code = "for name in ('rich', 'matplotlib'): sys.modules[name] = None"
    script = "import sys\nfrom pylate.scores import colbert_scores as f\nprint(sys.argv[1:], hasattr(f, '__wrapped__'))"
    (tmp_path / "script.py").write_text(script)
    arguments = ["--help", "--set", "a=b", "-v", "--", "--version"]
    done = launched("run", tmp_path / "script.py", *arguments, code=code)
    assert done.stdout.strip() == f"{arguments} True", done.stderr
    done = launched("doctor", code=code)
    assert done.returncode == 0 and pylate_fastmaxsim.__version__ in done.stdout, done.stderr
