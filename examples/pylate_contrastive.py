"""Contrastive training of a ColBERT with PyLate, without this package and with it."""

import torch
from datasets import Dataset
from pylate import losses, models, utils
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

import pylate_fastmaxsim
from made_up import StepTimes, encoder, rows

MODEL = encoder()  # random weights; yours: "answerdotai/ModernBERT-base"
ROWS = Dataset.from_list(rows(500))  # yours: columns query, positive, and as many negatives as you like


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
        loss=losses.Contrastive(model=model),
        data_collator=utils.ColBERTCollator(tokenize_fn=model.tokenize),
        callbacks=[times := StepTimes()],
    )
    result = trainer.train()
    print(f"{title}: {times}, loss {result.training_loss:.4f}")


train("PyLate")
# stock_masking keeps PyLate's rule for masked tokens, so that both losses are the same.
pylate_fastmaxsim.enable(stock_masking=True)
train("PyLate with pylate-fastmaxsim")
print(pylate_fastmaxsim.status())  # whether the model was encoded without padding, and why
