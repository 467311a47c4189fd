"""A recipe small enough to be run by a test."""

import json
import re
from pathlib import Path

import yaml
from datasets import Dataset

TEXT = "fused late interaction scores every query token against all tokens and writes no similarity tensor"
WORDS = TEXT.split()
LENGTHS = {"embedding_size": 8, "query_length": 8, "document_length": 24}
ONE_LAYER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}


def text(number: int, length: int) -> str:
    """A sentence of ``length`` words that is different for every number."""
    return " ".join(WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(length))


def fell_back(said: str) -> list[str]:
    """What the plugin says where it leaves something to stock PyLate, of the output of a command."""
    words = " ".join(said.split())
    return [reason for reason in ("with padding", "not fused", "as PyLate has it") if reason in words]


def split_overrides(written: str) -> list[str]:
    """The overrides of a recipe that are written in a row."""
    return re.split(r" (?=[a-z_.]+=)", written) if written else []


def json_lines(file: Path, rows: list) -> str:
    """Write a file of rows in JSON, with lone surrogates as bytes that are no UTF-8; its name."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_bytes(lines.encode(errors="surrogateescape"))
    return str(file)


def tiny(directory: Path, output: str = "out", rows: list[dict] | None = None, **sections) -> dict:
    """A recipe of a one-layer model that trains in a second, its rows and its output in ``directory``."""
    if rows is None:
        rows = [{"query": text(i, 4), "positive": f"{text(i, 4 + i % 17)} number {i}"} for i in range(60)]
    pairs = json_lines(directory / "pairs.jsonl", rows)
    training = {"per_device_train_batch_size": 4, "max_steps": 14, "learning_rate": 1e-3, "logging_steps": 1}
    training |= {"save_steps": 4, "dataloader_drop_last": True, "report_to": "none", "use_cpu": True}
    recipe = {
        "output_dir": str(directory / output),
        "model": {"build": {"vocab_size": 600, "dropout": 0.1, **ONE_LAYER}, **LENGTHS},
        "data": {"source": "files", "files": [pairs]},
        "training": training,
        "evaluation": {"rows": 24},
        "fast": {"enabled": False},
    }
    for section, values in sections.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    return recipe


def write(directory: Path, recipe: dict, name: str = "tiny") -> Path:
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def list_rows(count: int = 40) -> list[dict]:
    """Rows with lists of positives and of negatives, which differ in length."""
    positives = [[f"{text(n, 9)} {n}"] * (1 + n % 2) for n in range(count)]
    negatives = [[text(n + k, 7) for k in range(1 + n % 3)] for n in range(count)]
    return [{"question": text(n, 4), "pos": positives[n], "neg": negatives[n]} for n in range(count)]


def hub_dataset(folder: Path, **subsets: list[dict]) -> Path:
    """A folder laid out as a data set on the Hub: a card that names the subsets, and their Parquet files."""
    configs = []
    for name, rows in subsets.items():
        (folder / name).mkdir(parents=True)
        Dataset.from_list(rows).to_parquet(folder / name / "train-00000-of-00001.parquet")
        configs.append({"config_name": name, "data_files": [{"split": "train", "path": f"{name}/train-*"}]})
    card = yaml.safe_dump({"configs": configs})
    (folder / "README.md").write_text(f"---\n{card}---\n")
    return folder


def kd_subsets(rows: int = 24, ways: int = 5, documents: int = 60) -> dict[str, list[dict]]:
    """The three tables of a distillation data set, with ids that are not row numbers."""

    def taught(row: int) -> dict:
        ids = [f"d{(row * 7 + way * 11) % documents}" for way in range(ways)]
        scores = [1.0 - way / ways - row / 100 for way in range(ways)]
        return {"query_id": f"q{rows - row}", "document_ids": ids, "scores": scores}

    texts = {f"d{row}": f"{text(row, 2 + row % 25)} {row}" for row in reversed(range(documents))}
    return {
        "train": list(map(taught, range(rows))),
        "queries": [{"query_id": f"q{row}", "text": text(row, 5)} for row in range(rows + 1)],
        "documents": [{"document_id": name, "text": words} for name, words in texts.items()],
    }


FEW_STEPS = """model.embedding_size=8 model.query_length=12 model.document_length=32
training.per_device_train_batch_size=8 training.max_steps=2 training.use_cpu=true training.dataloader_num_workers=0
training.logging_steps=1 training.report_to=none"""


def few_steps(output: Path, *overrides: str) -> list[str]:
    """Overrides under which a shipped recipe trains for two steps on a CPU."""
    return [f"output_dir={output}", *FEW_STEPS.split(), *overrides]
