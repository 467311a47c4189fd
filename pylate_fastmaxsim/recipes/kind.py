"""The interface of a kind of model. Each kind is a file in ``kinds``."""

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.evaluation import NanoBEIREvaluator
from torch import Tensor, nn
from transformers import ModernBertModel, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from pylate_fastmaxsim.recipes.config.schema import LossSection, ModelSection, Recipe


class Kind:
    """A kind of model that recipes train: how it is made, given rows, trained, and counted in a comparison."""

    host: str  # the library that trains it, by its name; on PyPI with hyphens for spaces
    arguments_class: type[TrainingArguments] = SentenceTransformerTrainingArguments
    arguments: dict[str, Any] = {}  # that the host needs
    own_card: dict[str, Any] | None = None  # metadata of a card, where that of the host says nothing of the training
    nano_beir_evaluator: Callable[..., NanoBEIREvaluator]  # of which only queries, documents and judgements are used
    encoder_class: type[PreTrainedModel] = ModernBertModel  # of a model from scratch

    def load(self, section: ModelSection, device: torch.device | str, key: str, base: str) -> Any:
        """The model of a section, or of a checkpoint of the training of ``base``; an error calls it ``key``.

        What it lacks is drawn from the random numbers in force.
        """
        raise NotImplementedError

    def from_encoder(self, section: ModelSection, device: torch.device | str) -> Any:
        """The host's model class with the values of a section."""
        raise NotImplementedError

    def fit_columns(self, recipe: Recipe, dataset: Dataset) -> Dataset:
        """Rows under names that the host's collator knows; refuse columns that do not fit it or the loss."""
        raise NotImplementedError

    def build_trainer(self, loss: LossSection, model: Any, rows: Dataset, arguments: TrainingArguments) -> Trainer:
        """The host's trainer, with its collator and the loss of a recipe, which saves whole models under FSDP too."""
        raise NotImplementedError

    def gradient_logger(self, recipe: Recipe, trainer: Trainer) -> TrainerCallback:
        """The callback of ``training.log_gradient_concentration``."""
        raise NotImplementedError

    def divergence(self, loss: LossSection, scores: Tensor, teacher: Tensor) -> Tensor:
        """The KL divergence of a teacher's scores from a model's, both ``[N, n]`` in float64, as the host computes it."""
        return kl_divergence(scores, teacher)

    def count(self, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """Numbers of a batch: :func:`~pylate_fastmaxsim.comparison.trainer.count_tokens`."""
        raise NotImplementedError

    def counted_module(self, model: Any) -> nn.Module | None:
        """The module whose inputs are the tokens that the encoder is given, padding included; None if ``count`` says it."""
        return None


def kl_divergence(scores: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL divergence of the softmaxes of scores ``[N, n]`` divided by ``temperature``, times the square of that, mean over the rows."""
    log_student, log_teacher = ((each / temperature).log_softmax(1) for each in (scores, teacher))
    return (log_teacher.exp() * (log_teacher - log_student)).sum(1).mean() * temperature**2
