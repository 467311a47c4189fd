"""Training of a SparseEncoder (SPLADE), without this package and with it."""

import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

import pylate_fastmaxsim
from made_up import StepTimes, encoder, rows

MODEL = encoder(masked_lm=True)  # random weights; yours: "distilbert/distilbert-base-uncased"
ROWS = Dataset.from_list(rows(500))  # yours: columns query, positive, and as many negatives as you like


def train(title: str) -> None:
    torch.manual_seed(0)
    model = SparseEncoder(MODEL)
    arguments = SparseEncoderTrainingArguments(
        "output",
        num_train_epochs=1,
        per_device_train_batch_size=16,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
    )
    loss = SparseMultipleNegativesRankingLoss(model)
    trainer = SparseEncoderTrainer(
        model=model,
        args=arguments,
        train_dataset=ROWS,
        loss=SpladeLoss(model, loss, document_regularizer_weight=1e-3, query_regularizer_weight=5e-5),
        callbacks=[times := StepTimes()],
    )
    result = trainer.train()
    print(f"{title}: {times}, loss {result.training_loss:.4f}")


train("SPLADE")
pylate_fastmaxsim.enable()
train("SPLADE with pylate-fastmaxsim")
print(pylate_fastmaxsim.status())  # whether the model was encoded without padding, and why
