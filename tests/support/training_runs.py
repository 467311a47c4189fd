"""Whole training runs with the Sentence Transformers trainer."""

import torch
from datasets import Dataset
from pylate.models import ColBERT
from pylate.utils import ColBERTCollator
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from tests.support.models import sentences

ROWS, BATCH = 24, 6


def pairs(*columns: str) -> Dataset:
    """Queries, and a column of documents for each name: by default "positive" and "negative"."""
    texts = {"query": sentences(ROWS, longest=8)}
    texts |= {column: sentences(ROWS, seed=1 + i) for i, column in enumerate(columns or ("positive", "negative"))}
    return Dataset.from_dict(texts)


def candidates() -> Dataset:
    """Queries with four scored documents each."""
    texts = sentences(4 * ROWS, seed=1)
    documents = [texts[4 * row : 4 * row + 4] for row in range(ROWS)]
    scores = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_dict({"query": sentences(ROWS, longest=8), "documents": documents, "label": scores})


def train(model: ColBERT, loss, data: Dataset | dict[str, Dataset], folder, **arguments) -> list[float]:
    """The loss of each step."""
    options = {"num_train_epochs": 2, "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
    options |= {"learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": [], "seed": 1}
    options |= {"output_dir": str(folder), "disable_tqdm": True, "use_cpu": True, **arguments}
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**options),
        train_dataset=data,
        eval_dataset=data,
        loss=loss,
        data_collator=ColBERTCollator(tokenize_fn=model.tokenize),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
