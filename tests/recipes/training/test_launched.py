"""Every recipe under ``accelerate launch`` with two processes, on stand-ins of the model and data that it names."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import RECIPES, SUPPORT

pytest.importorskip("datasets")
pytest.importorskip("pylate")

import torch
from safetensors.torch import load_file
from test_mining import recipe_for, teacher  # noqa: F401  (a fixture)
from tiny_recipe import fell_back, few_steps, hub_dataset, kd_subsets, text

from pylate_fastmaxsim.recipes.mining import mine as mining_mine

LAUNCHED = SUPPORT / "launched.py"

LAUNCH = ["accelerate.commands.launch", "--num_processes=2", "--num_machines=1"]
LAUNCH += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
KINDS = {
    # Not --cpu, for which accelerate needs MPI; training.use_cpu makes it two processes on the CPU.
    "ddp": ["--multi_gpu"],
    # Version 1 needs a GPU. So does the loading that is left out, which begins with an empty model.
    "fsdp": ["--use_fsdp", "--fsdp_version=2", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"]
    + ["--fsdp_transformer_layer_cls_to_wrap=ModernBertEncoderLayer", "--fsdp_cpu_ram_efficient_loading=false"]
    + ["--fsdp_sync_module_states=false", "--fsdp_state_dict_type=FULL_STATE_DICT"],
}

NAMES = ["quickstart", "colbert_msmarco", "colbert_gradcache", "gathered", "colbert_kd", "colbert_kd_mine"]
NAMES += ["long_documents", "nano_beir"]

METRICS = {
    **dict.fromkeys(("colbert_msmarco", "long_documents"), {"ndcg@10", "accuracy"}),
    **dict.fromkeys(("colbert_kd", "colbert_kd_mine"), {"ndcg@10", "kl_divergence"}),
    "nano_beir": {"ndcg@10", "mrr@10", "recall@100"},
}


def launch(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *LAUNCH, *arguments], capture_output=True, text=True, timeout=900)


def jobs(folder: Path, model: str, teacher: str) -> dict[str, dict]:  # noqa: F811
    """Of each recipe its file and what makes it small."""
    triplets = [{"query": text(i, 5), "positive": text(i, 9), "negative": text(i + 1, 3 + i % 25)} for i in range(60)]
    pairs = [{"query": text(i, 5), "document": text(i, 3 + i % 20)} for i in range(60)]
    long = [
        {"anchor": row["query"], "positive": text(i, 200), "negative": row["negative"]}
        for i, row in enumerate(triplets)
    ]
    data = {
        "triplet": hub_dataset(folder / "triplets", triplet=triplets),
        "gooaq": hub_dataset(folder / "gooaq", gooaq=pairs),
        "en-triplet": hub_dataset(folder / "long", **{"en-triplet": long}),
        "kd": hub_dataset(folder / "kd", **kd_subsets()),
        "nq": hub_dataset(
            folder / "NanoNQ",
            corpus=[{"_id": f"d{i}", "text": row["document"]} for i, row in enumerate(pairs)],
            queries=[{"_id": f"q{i}", "text": row["query"]} for i, row in enumerate(pairs)],
            qrels=[{"query-id": f"q{i}", "corpus-id": f"d{i}"} for i in range(6)],
        ),
    }
    mining_mine.mine(recipe_for(folder, model, teacher))
    # With dropout, so that each process must go on with its own random numbers.
    dropout = "model.config_kwargs={embedding_dropout: 0.1, attention_dropout: 0.1, mlp_dropout: 0.1}"
    loaded = [f"model.name_or_path={model}", dropout]
    gradcache = [f"data.name={data['gooaq']}", "data.config=gooaq", "data.split=train", "loss.mini_batch_size=2"]
    of = {
        "quickstart": [
            "data.packages=[numpy]",
            "data.max_rows=60",
            "model.build.dropout=0.1",
            "model.build.hidden_size=16",
        ],
        "colbert_msmarco": [*loaded, f"data.name={data['triplet']}"],
        "colbert_gradcache": [*loaded, *gradcache],
        "gathered": [*loaded, *gradcache, "loss.gather_across_devices=true"],
        "colbert_kd": [*loaded, f"data.name={data['kd']}", "data.n_ways=4"],
        "colbert_kd_mine": [*loaded, f"data.name={folder / 'mined'}"],
        "long_documents": [*loaded, f"data.name={data['en-triplet']}", "model.document_length=128"],
        "nano_beir": [*loaded, f"data.name={data['triplet']}", "evaluation={nano_beir: [nq]}"],
    }
    recipes = {"gathered": "colbert_gradcache", "nano_beir": "colbert_msmarco"}
    steps = ["training.per_device_train_batch_size=3", "training.max_steps=5", "training.save_steps=2"]
    return {
        name: {
            "recipe": str(RECIPES / f"{recipes.get(name, name)}.yaml"),
            "nano_beir": {"nq": str(data["nq"])},
            "overrides": [*few_steps(folder), "evaluation.rows=6", *steps, *overrides],
        }
        for name, overrides in of.items()
    }


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory, encoder, teacher) -> Path:  # noqa: F811
    """All recipes in one pair of processes, because starting it takes longer than they do."""
    folder = tmp_path_factory.mktemp("launched")
    of = jobs(folder, encoder("modernbert"), teacher)
    assert list(of) == NAMES
    (folder / "jobs.json").write_text(json.dumps(of))
    done = launch(*KINDS[request.param], str(LAUNCHED), str(folder))
    (folder / "said").write_text(done.stdout + done.stderr)
    return folder


@pytest.fixture
def said(folder) -> Callable[[], str]:
    return lambda: (folder / "said").read_text()[-3000:]


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_run_that_goes_on_is_equal_to_an_uninterrupted_one(name, folder, said, request):
    file = folder / f"{name}-0.json"
    assert file.exists(), said()
    whole, parts = (json.loads(file.read_text())[key] for key in ("whole", "parts"))
    assert whole["steps"] == len(whole["losses"]) == 5 and whole["fast"]["enabled"]
    assert parts["resumed_from"] == "checkpoint-2"
    assert METRICS.get(name, {"ndcg@10"}) == parts.keys() & {key for keys in METRICS.values() for key in keys}
    weights = [load_file(folder / f"{name}-{part}" / "model" / "model.safetensors") for part in ("whole", "parts")]
    if request.node.callspec.params["folder"] == "fsdp":
        # In a new process FSDP gathers weights to other addresses, and by their alignment a CPU's products round.
        assert parts["ndcg@10"] == pytest.approx(whole["ndcg@10"], abs=0.05)
        for (step, loss), (expected_step, expected) in zip(parts["losses"], whole["losses"], strict=True):
            assert step == expected_step and loss == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)
        return
    assert parts["losses"] == whole["losses"]
    assert parts["ndcg@10"] == whole["ndcg@10"] is not None
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_machines_that_see_other_checkpoints_are_refused(folder, said):
    files = [folder / f"apart-{rank}" for rank in (0, 1)]
    assert all(file.exists() for file in files), said()
    for file, output in zip(files, (folder / f"{NAMES[-1]}-parts", folder / "apart"), strict=True):
        assert file.read_text() == (
            f"output_dir: {output} must be on a disk that all machines share, but the last checkpoint there is checkpoint-5 "
            "or none; share it, or start over with --no-resume."
        )


def test_nothing_falls_back(folder):
    assert not fell_back((folder / "said").read_text())


def test_no_two_processes_write_the_same_file(folder, said):
    files = [folder / f"written-{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), said()
    first, second = (set(json.loads(file.read_text())) for file in files)
    shared = {path for path in first & second if not path.endswith(".lock") and not path.startswith("/dev/")}
    assert not shared
    assert all(any(path.endswith(name) for path in first) for name in ("train.json", "model/model.safetensors"))
    # By the rights of the second process, which native code keeps to as well, other than safetensors.
    outputs = [path for part in ("whole", "parts") for name in NAMES for path in (folder / f"{name}-{part}").rglob("*")]
    hidden = {path.name for path in outputs if path.is_file() and not stat.S_IMODE(path.stat().st_mode) & 0o044}
    assert hidden - {"model.safetensors"} == {"rng_state_1.pth"}
    assert not any(path.endswith(".safetensors") for path in second)
