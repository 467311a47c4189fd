"""Training of a ColBERT with a loss of your own, without this package and with it."""

import torch
from datasets import Dataset
from pylate import models, utils
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

import pylate_fastmaxsim
from made_up import StepTimes, encoder, rows
from pylate_fastmaxsim import encode, maxsim

MODEL = encoder()  # random weights; yours: "answerdotai/ModernBERT-base"
ROWS = Dataset.from_list(rows(500))  # yours: columns query, positive, and as many negatives as you like


class Margin(torch.nn.Module):
    """The positive of each query has to beat the query's own negatives by 1."""

    def __init__(self, model: models.ColBERT) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: list[dict], labels: torch.Tensor | None = None) -> torch.Tensor:
        queries, documents = encode(self.model, sentence_features)  # without padding where the package is on
        own = torch.arange(len(documents), device=documents.device)  # documents come query by query
        scores = maxsim(queries, documents, candidates=own.view(len(queries), -1))
        return torch.relu(1 + scores[:, 1:] - scores[:, :1]).mean()


def train(title: str) -> None:
    torch.manual_seed(0)
    model = models.ColBERT(MODEL, document_length=300)
    arguments = SentenceTransformerTrainingArguments(
        "output",
        num_train_epochs=1,
        per_device_train_batch_size=16,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=ROWS,
        loss=Margin(model),
        data_collator=utils.ColBERTCollator(tokenize_fn=model.tokenize),
        callbacks=[times := StepTimes()],
    )
    result = trainer.train()
    print(f"{title}: {times}, loss {result.training_loss:.4f}")


train("PyLate")
pylate_fastmaxsim.enable()
train("PyLate with pylate-fastmaxsim")
print(pylate_fastmaxsim.status())  # whether the model was encoded without padding, and why
