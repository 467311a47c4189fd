"""Contrastive training of a MultiVectorEncoder, without this package and with it."""

import torch
from datasets import Dataset
from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss

import pylate_fastmaxsim
from made_up import StepTimes, encoder, rows

MODEL = encoder()  # random weights; yours: "answerdotai/ModernBERT-base"
ROWS = Dataset.from_list(rows(500))  # yours: columns query, positive, and as many negatives as you like


def train(title: str) -> None:
    torch.manual_seed(0)
    model = MultiVectorEncoder(MODEL)
    arguments = MultiVectorEncoderTrainingArguments(
        "output",
        num_train_epochs=1,
        per_device_train_batch_size=16,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
    )
    trainer = MultiVectorEncoderTrainer(
        model=model,
        args=arguments,
        train_dataset=ROWS,
        loss=MultiVectorMultipleNegativesRankingLoss(model),
        callbacks=[times := StepTimes()],
    )
    result = trainer.train()
    print(f"{title}: {times}, loss {result.training_loss:.4f}")


train("MultiVectorEncoder")
pylate_fastmaxsim.enable()
train("MultiVectorEncoder with pylate-fastmaxsim")
print(pylate_fastmaxsim.status())  # whether the model was encoded without padding, and why
