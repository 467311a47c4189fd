"""The interface of a kind of model, and how that of a recipe is found. Each kind is a file in ``kinds``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sentence_transformers
from transformers import ModernBertModel, PreTrainedModel

from pylate_fastmaxsim.recipes.config.schema import LossSection, ModelSection, Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from datasets import Dataset
    from sentence_transformers.evaluation import NanoBEIREvaluator
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments
MODULES = {
    "colbert": "colbert",
    "multi_vector": "multi_vector",
    "splade": "splade",
    "colpali": "pages",
    "colqwen2": "pages",
}
# The library that a kind needs, and the extras that bring it.
NEEDED = {"colbert": ("PyLate", "pylate,recipes"), "pages": ("colpali-engine", "pylate,recipes,colpali")}


class Kind:
    """A kind of model that recipes train: how it is made, given rows, trained, and counted in a comparison.

    Attributes
    ----------
    host
        The library that trains it, by its name on PyPI.
    arguments_class, arguments
        Of the trainer's arguments, and values that the host needs.
    plain_trainer
        The host's trainer. That of recipes saves whole models, also under FSDP and DeepSpeed.
    writes_card
        Whether the host's card of a saved model says something of its training.
    nano_beir_evaluator
        The host's evaluator of NanoBEIR, of which only the queries, documents and judgements are used.
    encoder_class
        Of a model from scratch.
    """

    host: str
    arguments_class: type[TrainingArguments]
    arguments: dict[str, Any] = {}
    plain_trainer: type[Trainer]
    writes_card = True
    nano_beir_evaluator: Callable[..., NanoBEIREvaluator]
    encoder_class: type[PreTrainedModel] = ModernBertModel

    def load(self, section: ModelSection, device: torch.device | str, key: str, checkpoint: Path | None = None) -> Any:
        """The model of a section; what its checkpoint lacks is drawn from the random numbers in force.

        Parameters
        ----------
        section
            A section of this kind.
        device
            Where the weights go.
        key
            What an error calls the model.
        checkpoint
            A checkpoint of the training of this section, which is loaded instead.
        """
        raise NotImplementedError

    def of_encoder(self, section: ModelSection, device: torch.device | str) -> Any:
        """The host's model class with the values of a section."""
        raise NotImplementedError

    def tokenizer_of(self, model: Any) -> PreTrainedTokenizerBase:
        """The tokenizer that a model was loaded with; of pages that of its queries."""
        return model.tokenizer

    def check_lengths(self, section: ModelSection, model: Any) -> None:
        """Refuse lengths beyond the encoder's positions."""

    def fitted(self, recipe: Recipe, dataset: Dataset) -> Dataset:
        """Rows under names that the host's collator knows; refuse columns that do not fit it or the loss."""
        raise NotImplementedError

    def build_trainer(
        self,
        loss: LossSection,
        model: Any,
        rows: Dataset,
        arguments: TrainingArguments,
        trainer_class: type[Trainer] | None = None,
    ) -> Trainer:
        """A trainer with the collator of the host and the loss of a recipe, by default that of recipes."""
        raise NotImplementedError

    def gradient_logger(self, recipe: Recipe, trainer: Trainer) -> TrainerCallback:
        """The callback of ``training.log_gradient_concentration``."""
        raise NotImplementedError

    def divergence(self, loss: LossSection, scores: Tensor, teacher: Tensor) -> Tensor:
        """The KL divergence of a teacher's scores from a model's, both ``[N, n]`` in float64, as the host computes it."""
        return kl_divergence(scores, teacher)

    def count(self, trainer: Trainer, inputs: dict[str, Any]) -> dict[str, Any]:
        """How many ``documents``, tokens of them that are ``live``, and ``query_tokens`` a batch has."""
        raise NotImplementedError

    def counted_module(self, model: Any) -> nn.Module | None:
        """The module whose inputs are the tokens that the encoder is given, padding included; None if ``count`` says it."""
        return None


def kind_of(model: ModelSection) -> Kind:
    """The kind of a model.

    Raises
    ------
    RecipeError
        The library that trains it is not installed, or in an earlier release.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.config.kinds import SpladeSection
    >>> from pylate_fastmaxsim.recipes.kind import kind_of
    >>> kind_of(SpladeSection()).host
    'sentence-transformers'
    """
    module = MODULES[model.kind]
    if module == "multi_vector" and not hasattr(sentence_transformers, "MultiVectorEncoder"):
        raise RecipeError(
            "model.kind multi_vector needs Sentence Transformers 6, in an environment without PyLate: pip install "
            f'"pylate-fastmaxsim[multi-vector,recipes]" (installed is {sentence_transformers.__version__}).'
        )
    try:
        return import_module(f"pylate_fastmaxsim.recipes.kinds.{module}").KIND
    except ImportError as error:
        if module not in NEEDED:
            raise
        library, extra = NEEDED[module]
        raise RecipeError(
            f'model.kind {model.kind} needs {library}: pip install "pylate-fastmaxsim[{extra}]" ({error}).'
        ) from error


def kl_divergence(scores: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """That of softmaxes of scores ``[N, n]`` divided by ``temperature``, times the square of that, mean over the rows."""
    log_student, log_teacher = ((each / temperature).log_softmax(1) for each in (scores, teacher))
    return (log_teacher.exp() * (log_teacher - log_student)).sum(1).mean() * temperature**2
