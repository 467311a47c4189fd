"""A recipe small enough to be run by a test."""

import json
from pathlib import Path

import yaml

TEXT = "fused late interaction scores every query token against all tokens and writes no similarity tensor"
WORDS = TEXT.split()


def text(number: int, length: int) -> str:
    """A sentence of ``length`` words that is different for every number."""
    return " ".join(WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(length))


def tiny(directory: Path, output: str = "out", **sections) -> dict:
    """A recipe of a one-layer model that trains in a second, its rows and its output in ``directory``."""
    pairs = directory / "pairs.jsonl"
    rows = [{"query": text(i, 4), "positive": f"{text(i, 4 + i % 17)} number {i}"} for i in range(60)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "output_dir": str(directory / output),
        "model": {
            "build": {
                "vocab_size": 600,
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "intermediate_size": 16,
                "dropout": 0.1,
            },
            "embedding_size": 8,
            "query_length": 8,
            "document_length": 24,
        },
        "data": {"source": "files", "files": [str(pairs)]},
        "training": {
            "per_device_train_batch_size": 4,
            "max_steps": 14,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_steps": 4,
            "dataloader_drop_last": True,
            "report_to": "none",
            "use_cpu": True,
        },
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
