"""What goes wrong on a user's machine ends in one clear sentence, and nothing that was computed is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from paths import RECIPES

pytest.importorskip("typer")
pytest.importorskip("pylate")

import torch
import yaml
from datasets import Dataset
from pylate.models import ColBERT, Dense
from test_mining import recipe_for, teacher  # noqa: F401  (a fixture)
from tiny_recipe import hub_dataset, text, tiny, write
from typer.testing import CliRunner

from pylate_fastmaxsim.cli.commands import app
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training import arguments
from pylate_fastmaxsim.recipes.training.sharded import RecipeTrainer

COLQWEN = RECIPES / "colqwen_vidore.yaml"


def command(name: str, recipe: Path, *overrides: str):
    sets = [argument for override in overrides for argument in ("--set", override)]
    return CliRunner().invoke(app, [name, str(recipe), *sets])


def last_line(process: subprocess.CompletedProcess) -> str:
    return process.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["train", "compare"])
@pytest.mark.parametrize("family", ["modernbert", "bert", "xlm-roberta"])
def test_a_model_without_a_tokenizer(name, family, encoder, tmp_path):
    model = shutil.copytree(encoder(family), tmp_path / "model")
    for file in model.glob("tokenizer*"):
        file.unlink()
    recipe = tiny(tmp_path)
    recipe["model"] = {"name_or_path": str(model)}
    done = command(name, write(tmp_path, recipe))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"fastmaxsim: model.name_or_path {model} has no tokenizer that can be loaded; it must be saved beside the model.\n"
    )
    assert not (tmp_path / "out").exists()


def test_data_without_the_named_column(encoder, teacher, tmp_path):  # noqa: F811
    file = write(tmp_path, tiny(tmp_path))
    done = command("train", file, "data.columns=[query, document]")
    assert done.exit_code == 2
    assert done.stderr == (
        "fastmaxsim: data.columns: no column 'document', the data has the columns query, positive.\n"
    )
    pairs = tmp_path / "mine.yaml"
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.pairs.columns=[query, document]")
    pairs.write_text(yaml.safe_dump(asdict(recipe)))
    done = command("mine", pairs)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "mining.pairs.columns: no column 'document', the data has the columns query, answer." in done.stderr
    rows = {
        "train": [{"query_id": "1", "document_ids": ["1", "2"]}],
        "queries": [{"query_id": "1", "text": "a"}],
        "documents": [{"document_id": "1", "text": "b"}],
    }
    data = f"data={{source: distillation, name: {hub_dataset(tmp_path / 'kd', **rows)}}}"
    done = command("train", file, data, "loss.name=distillation")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "data.name: the subset train has no column 'scores', it has query_id, document_ids." in done.stderr


@pytest.mark.parametrize(
    ("documents", "scores", "sentence"),
    [
        (
            3,
            2,
            "every row must have 3 documents, as the first has, and a score for each, but row 5 has 3 and 2 scores.",
        ),
        (
            2,
            3,
            "every row must have 3 documents, as the first has, and a score for each, but row 5 has 2 and 3 scores.",
        ),
        (
            2,
            2,
            "every row must have 3 documents, as the first has, and a score for each, but row 5 has 2 and 2 scores.",
        ),
        (
            3,
            0,
            "every row must have 3 documents, as the first has, and a score for each, but row 5 has 3 and 0 scores.",
        ),
    ],
)
def test_teacher_scores_of_the_wrong_length(documents, scores, sentence, tmp_path):
    rows = []
    for row in range(12):
        n, m = (documents, scores) if row == 5 else (3, 3)
        rows.append({"query": text(row, 4), "documents": [text(i, 5) for i in range(n)], "scores": [0.5] * m})
    (tmp_path / "kd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tiny(tmp_path, data={"files": [str(tmp_path / "kd.jsonl")]}, loss={"name": "distillation"})
    done = command("train", write(tmp_path, recipe), "evaluation.rows=0")
    assert (done.exit_code, done.stderr) == (2, f"fastmaxsim: data.columns: {sentence}\n")
    assert not (tmp_path / "out").exists()
    if documents != scores:
        subsets = {
            "train": [
                {
                    "query_id": str(number),
                    "document_ids": [str(i) for i in range(len(row["documents"]))],
                    "scores": row["scores"],
                }
                for number, row in enumerate(rows)
            ],
            "queries": [{"query_id": str(number), "text": row["query"]} for number, row in enumerate(rows)],
            "documents": [{"document_id": str(number), "text": text(number, 5)} for number in range(3)],
        }
        data = f"data={{source: distillation, name: {hub_dataset(tmp_path / 'kd', **subsets)}}}"
        done = command("train", write(tmp_path, recipe), data, "evaluation.rows=0")
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
        assert f"the row of query_id 5 has {documents} document_ids but {scores} scores" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"documents": ["a", None, "c"]}, "'documents' must hold texts, but some are missing."),
        ({"documents": None, "scores": None}, "row 5 has 0 and 0 scores."),
        ({"query": None}, "'query' must hold a text in every row, but some have none."),
        ({"scores": [0.5, None, 0.1]}, "'scores' must hold finite numbers, but some are missing."),
        ({"scores": [0.5, float("nan"), 0.1]}, "'scores' must hold finite numbers, but some are nan or infinite."),
        ({"scores": [0.5, float("inf"), 0.1]}, "'scores' must hold finite numbers, but some are nan or infinite."),
    ],
)
def test_distillation_rows_in_files_without_a_text_or_a_score(wrong, sentence, tmp_path):
    rows = [{"query": text(row, 4), "documents": ["a", "b", "c"], "scores": [0.5, 0.2, 0.1]} for row in range(12)]
    rows[5] |= wrong
    assert refused_rows(rows, tmp_path).endswith(f" {sentence}\n")


def test_distillation_rows_in_files_of_other_types(tmp_path):
    rows = [{"query": text(row, 4), "documents": ["a", "b"], "scores": ["high", "low"]} for row in range(12)]
    said = refused_rows(rows, tmp_path)
    assert said.endswith(" 'scores' must hold lists of finite numbers, but it holds lists of string.\n")
    said = refused_rows([row | {"documents": [1, 2]} for row in rows], tmp_path)
    assert said.endswith(" 'documents' must hold lists of texts, but it holds lists of int64.\n")


def refused_rows(rows: list[dict], tmp_path: Path) -> str:
    Dataset.from_list(rows).to_parquet(tmp_path / "kd.parquet")
    recipe = tiny(tmp_path, data={"files": [str(tmp_path / "kd.parquet")]}, loss={"name": "distillation"})
    done = command("train", write(tmp_path, recipe), "evaluation.rows=0")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("fastmaxsim: data.columns: ")
    return done.stderr


@pytest.mark.parametrize("name", ["train", "compare"])
@pytest.mark.parametrize("built", [True, False])
def test_an_output_folder_that_cannot_be_made(name, built, encoder, tmp_path):
    recipe = tiny(tmp_path)
    if not built:
        recipe["model"] = {"name_or_path": encoder("modernbert")}
    file = write(tmp_path, recipe)
    (tmp_path / "file").write_text("kept")
    taken = tmp_path / "file"
    sentences = {taken / "below": f"output_dir must be a directory or a path yet to be made, but {taken} is a file."}
    if sys.platform == "linux":
        sentences["/proc/x"] = "output_dir /proc/x cannot be made: No such file or directory."
    for output, sentence in sentences.items():
        done = command(name, file, f"output_dir={output}")
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
        assert done.stderr.endswith(sentence.removeprefix("output_dir /proc/x") + "\n")
        assert done.stderr.startswith("fastmaxsim: output_dir ")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["training.save_steps=null"],
            "set training.gradient_checkpointing to true, or lower training.per_device_train_batch_size or "
            "model.document_length; there is no checkpoint yet",
        ),
        (
            [],
            "{out}/checkpoint-4 is kept: set training.gradient_checkpointing to true and go on from there, or lower "
            "training.per_device_train_batch_size or model.document_length and start over, with --no-resume or "
            "another output_dir",
        ),
        (
            ["training.gradient_checkpointing=true"],
            "{out}/checkpoint-4 is kept: lower training.per_device_train_batch_size or model.document_length and "
            "start over, with --no-resume or another output_dir",
        ),
        (
            ["loss={name: cached_contrastive, mini_batch_size: 4}"],
            "{out}/checkpoint-4 is kept: set training.gradient_checkpointing to true or lower loss.mini_batch_size "
            "and go on from there, or lower model.document_length and start over, with --no-resume or another "
            "output_dir",
        ),
    ],
)
def test_too_little_memory_says_what_takes_less(overrides, sentence, tmp_path, monkeypatch):
    file = write(tmp_path, tiny(tmp_path))
    step = RecipeTrainer.training_step

    def full(trainer, *args, **kwargs):
        if trainer.state.global_step == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.\nMore lines.")
        return step(trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "training_step", full)
        done = command("train", file, *overrides)
    assert done.exit_code == 1 and "Traceback" not in done.stderr
    said = sentence.format(out=tmp_path / "out")
    assert done.stderr.splitlines()[-1] == f"fastmaxsim: out of memory; {said}."
    if "and go on from there" in said:
        changed = ["training.gradient_checkpointing=true"]
        changed += [override.replace("4}", "2}") for override in overrides]
        assert command("train", file, *changed).exit_code == 0
        assert json.loads((tmp_path / "out" / "train.json").read_text())["resumed_from"] == "checkpoint-4"


# Ctrl-C in both of two processes; none of them ends before both have said what they say, or the launcher would end one.
BOTH_INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from pylate_fastmaxsim.recipes import train
from transformers import TrainerCallback

class Interrupt(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGINT)

build = train.build_trainer

def build_trainer(*args, **kwargs):
    trainer = build(*args, **kwargs)
    trainer.add_callback(Interrupt())
    return trainer

train.build_trainer = build_trainer
folder = Path(sys.argv.pop(1))
from pylate_fastmaxsim.cli import main
try:
    main()
except SystemExit as end:
    (folder / f"ended-{os.environ['RANK']}").write_text(str(end.code))
    while len(list(folder.glob("ended-*"))) < 2:
        time.sleep(0.05)
"""


def test_ctrl_c_under_a_launcher_is_said_once(tmp_path):
    (tmp_path / "run.py").write_text(BOTH_INTERRUPTED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, str(tmp_path / "run.py"), str(tmp_path), "train", str(write(tmp_path, tiny(tmp_path)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in (0, 1)] == ["130", "130"], done.stderr[-2000:]
    assert done.stderr.count("Interrupted: ") == 1
    assert f"Interrupted: {tmp_path}/out/checkpoint-4 is kept, and the same command goes on from there." in done.stderr


@pytest.fixture
def gpu_without_bf16(monkeypatch):
    """What PyTorch says of a GPU of compute capability 7.5, which emulates bf16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")


def test_a_gpu_without_bf16(gpu_without_bf16, tmp_path, monkeypatch):
    file = write(tmp_path, tiny(tmp_path))
    done = command("train", file, "training.precision=bf16", "training.use_cpu=false")
    assert done.exit_code == 2
    assert done.stderr == (
        "fastmaxsim: training.precision must be auto, fp16 or fp32 here, because the GPU (Tesla T4) has no bf16.\n"
    )
    assert not (tmp_path / "out").exists()
    recipe = load_recipe(file, ["training.use_cpu=false"])
    assert arguments._precision(recipe, on_gpu=True) == "fp16"
    pages = load_recipe(COLQWEN, ["model.dtype=bfloat16", "training.precision=fp16"])
    with pytest.raises(RecipeError) as error:
        arguments.training_arguments(pages)
    assert str(error.value) == ("model.dtype must be auto or float32 here, because the GPU (Tesla T4) has no bf16.")
    assert arguments._precision(pages, on_gpu=False) == "fp16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert arguments._precision(recipe, on_gpu=True) == "bf16"
    assert arguments._precision(recipe, on_gpu=False) == "fp32"
    assert arguments._precision(pages, on_gpu=True) == "fp16"


def test_adapters_on_a_gpu_without_bf16_go_over_float32_weights(gpu_without_bf16, monkeypatch):
    pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')
    from pylate_fastmaxsim.recipes.models.visual import _dtype

    section = load_recipe(COLQWEN).model
    assert section.dtype == "auto" and _dtype(section, torch.device("cuda")) == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert _dtype(section, torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize("override", ["training.optim=adamv", "training.lr_scheduler_type=steps"])
def test_an_argument_that_the_trainer_does_not_know(override, tmp_path):
    done = command("train", write(tmp_path, tiny(tmp_path)), override)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"fastmaxsim: training: {override.partition('=')[2]} is not a valid ")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("training.report_to=wandb", "training.report_to must be auto or none here, because wandb is not installed."),
        (
            "training.report_to=tensorboard",
            "training.report_to must be auto or none here, because tensorboard is not installed.",
        ),
        ("training.optim=adamw_8bit", "training.optim adamw_8bit cannot be used here: You need to install"),
        ("training.optim=galore_adamw", "training.optim galore_adamw cannot be used here: "),
        (
            "training.lr_scheduler_type=cosine_with_min_lr",
            "training.lr_scheduler_type cosine_with_min_lr cannot be used here: One of min_lr or min_lr_rate",
        ),
        (
            "training.lr_scheduler_type=warmup_stable_decay",
            "training.lr_scheduler_type warmup_stable_decay cannot be used here: ",
        ),
        (
            "training.lr_scheduler_type=reduce_lr_on_plateau",
            "training.lr_scheduler_type must not be reduce_lr_on_plateau, which needs evaluations during the training; ",
        ),
        ("model.build.intermediate_size=99999999999999999999", "model cannot be built: "),
        ("model.config_kwargs={attention_dropout: high}", "model cannot be built: "),
        # PyTorch asserts here.
        (
            "model.config_kwargs={pad_token_id: 9999}",
            "model cannot be built: Padding_idx must be within num_embeddings",
        ),
        ("model.query_length=100000", "model.query_length must be at most 8192, as many positions as ModernBertModel"),
    ],
)
def test_what_cannot_be_trained_here_is_said_before_anything_is_prepared(override, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr(arguments, "REPORTERS", dict.fromkeys(arguments.REPORTERS, lambda: False))
    file = write(tmp_path, tiny(tmp_path))
    # A comparison reports to no tool.
    for name in ["train"] if "report_to" in override else ["train", "compare"]:
        done = command(name, file, override)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"fastmaxsim: {sentence}")
        assert not (tmp_path / "out").exists()


# Tables of 64 positions, of which two of XLM-R stand before the first token.
@pytest.mark.parametrize(("family", "positions"), [("bert", 64), ("xlm-roberta", 62)])
def test_lengths_beyond_the_positions_of_the_encoder(family, positions, encoder, tmp_path):
    recipe = tiny(tmp_path, training={"max_steps": 1, "save_steps": None}, evaluation={"rows": 0})
    recipe["model"] = {"name_or_path": encoder(family)}
    file = write(tmp_path, recipe)
    for key in ("query_length", "document_length"):
        done = command("train", file, f"model.{key}={positions + 1}")
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"fastmaxsim: model.{key} must be at most {positions}, as many positions as ")
    assert not (tmp_path / "out").exists()
    done = command("train", file, f"model.query_length={positions}", f"model.document_length={positions}")
    assert done.exit_code == 0, done.output


def test_rotary_positions_do_not_limit_documents(encoder, tmp_path):
    recipe = tiny(tmp_path, training={"max_steps": 1, "save_steps": None}, evaluation={"rows": 0})
    recipe["model"] = {"name_or_path": encoder("modernbert"), "query_length": 128, "document_length": 200}
    file = write(tmp_path, recipe)
    done = command("train", file)
    assert done.exit_code == 0, done.output
    done = command("train", file, "model.query_length=129")
    assert done.exit_code == 2 and "model.query_length must be at most 128" in done.stderr


def test_another_embedding_size_than_that_of_a_trained_projection(encoder, tmp_path):
    recipe = tiny(tmp_path, training={"max_steps": 1, "save_steps": None}, evaluation={"rows": 0})
    trained = ColBERT(encoder("modernbert"), embedding_size=8, device="cpu")
    trained.save(str(tmp_path / "trained"))
    recipe["model"] = {"name_or_path": str(tmp_path / "trained")}
    file = write(tmp_path, recipe)
    for name in ("train", "compare"):
        done = command(name, file, "model.embedding_size=4")
        assert (done.exit_code, done.stderr) == (
            2,
            f"fastmaxsim: model.embedding_size must be 8 or null, because model.name_or_path {tmp_path}/trained ends with a "
            "projection of that size, got 4.\n",
        )
    assert not (tmp_path / "out").exists()
    # One that has two projections itself.
    trained.append(Dense(8, 4))
    trained.save(str(tmp_path / "trained"))
    assert command("train", file, "model.embedding_size=4").exit_code == 0


# Ctrl-C in the moment when the fifth part has been written, so that some of hundreds are done on any machine.
INTERRUPTED = """
import os, signal
from pylate_fastmaxsim.recipes import mining_parts
write = mining_parts.write_whole

def interrupted(file, content):
    write(file, content)
    if len(list(file.parent.glob("search-*"))) == 5:
        os.kill(os.getpid(), signal.SIGINT)

mining_parts.write_whole = interrupted
from pylate_fastmaxsim.cli import main
main()
"""


def test_ctrl_c_during_mining_loses_nothing(encoder, teacher, tmp_path):  # noqa: F811
    overrides = ["mining.documents_per_part=1", "mining.rows_per_part=1"]
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, *overrides)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(asdict(recipe)))
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "mine", str(file)], capture_output=True, text=True, timeout=300
    )
    unfinished, said = tmp_path / "mined.unfinished", process.stderr
    assert process.returncode == 130 and "Traceback" not in said
    assert said.strip().splitlines()[-1] == (
        "Interrupted: what is done is kept, and the same command goes on from there."
    )
    assert len(list(unfinished.glob("search-*.npz"))) == 5 and not list(unfinished.glob("teacher-*"))
    again = subprocess.run(
        [sys.executable, "-m", "pylate_fastmaxsim.cli", "mine", str(file)], capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stderr[-2000:]
    whole = recipe_for(tmp_path, encoder("modernbert"), teacher, *overrides, f"data.name={tmp_path / 'whole'}")
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(asdict(whole)))
    assert command("mine", tmp_path / "whole.yaml").exit_code == 0
    for name in ("train", "queries", "documents"):
        ours, expected = (tmp_path / folder / f"{name}.parquet" for folder in ("mined", "whole"))
        assert ours.read_bytes() == expected.read_bytes()
