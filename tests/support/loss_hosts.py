"""PyLate or Sentence Transformers' MultiVectorEncoder, of which one is installed, for the tests of our own losses.

``HOST`` has its models, batches and losses by the same names, and what a loss of ours has to equal, by the host alone.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim import encode, maxsim
from tests.support.hosts import host_of
from tests.support.models import features, sentences

try:
    from pylate import losses

    from tests.support import training_runs
except ImportError:  # Sentence Transformers 6 excludes it
    from tests.support import multi_vector

    training_runs = None

VIEWS = {"dims": (16, 6), "weights": (1.0, 0.5), "document_tokens": (None, 3), "token_weights": (2.0, 1.0)}
# Of ContrastiveDistillation, and in `both`.
OPTIONS = {"contrastive_weight": 0.7, "distillation_weight": 3.0, "temperature": 0.5, "teacher_temperature": 0.25}
COUNT, WAYS = 6, 3
LABELS = torch.rand(COUNT, WAYS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TEXTS = [sentences(COUNT, longest=8), *(sentences(COUNT, seed=1 + column) for column in range(WAYS))]


class ByHand(nn.Module):
    """Contrastive, and distillation of the teacher's scores for a query's own documents."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features, labels):
        queries, documents = encode(self.model, sentence_features)
        scores = maxsim(queries, documents)
        own = torch.arange(len(documents), device=labels.device).view(len(queries), -1)
        contrastive = F.cross_entropy(scores, own[:, 0])
        return contrastive + F.kl_div(scores.gather(1, own).log_softmax(1), labels.softmax(1), reduction="batchmean")


class Weighted(nn.Module):
    """A sum of losses that each encode, by their weights."""

    def __init__(self, model: nn.Module, *terms: tuple[float, Callable]) -> None:
        super().__init__()
        self.model, self.terms = model, terms

    def forward(self, sentence_features, labels):
        columns = [dict(column) for column in sentence_features]
        return sum(weight * loss(columns, labels) for weight, loss in self.terms)


class OverCutModels(nn.Module):
    """Matryoshka by the host alone: each view is encoded anew, by a model that cuts what it returns."""

    def __init__(self, loss: nn.Module, cut: Callable) -> None:
        super().__init__()
        self.model, self.loss, self.cut = loss.model, loss, cut

    def forward(self, sentence_features, labels):
        total = 0.0
        for dim, weight in zip(VIEWS["dims"], VIEWS["weights"], strict=True):
            for tokens, of_tokens in zip(VIEWS["document_tokens"], VIEWS["token_weights"], strict=True):
                hook = self.model.register_forward_hook(partial(self.cut, dim, tokens), with_kwargs=True)
                total = total + weight * of_tokens * self.loss([dict(each) for each in sentence_features], labels)
                hook.remove()
        return total


class Host:
    def __init__(self, name: str) -> None:
        self.steps = host_of(name)
        # Of enable(), for scores that are those of the host.
        self.exactly = self.steps.options

    def load(self, path: str, double: bool = True, **options: object):
        model = self.steps.load(path, **options)
        return model if double else model.float()

    def modes(self, model) -> set[str]:
        return self.steps.modes(model)

    def batch_for(self, name: str, model) -> list[dict]:
        return batch_of(model)


class PyLate(Host):
    tolerance, unit_means = 1e-10, False
    # Losses without GradCache by their names.
    losses = "contrastive", "distillation"

    def columns(self, model, *texts: list[str]) -> list[dict[str, Tensor]]:
        return features(model, *texts)

    def loss(self, name: str, model) -> nn.Module:
        if name == "distillation":
            return losses.Distillation(model, normalize_scores=False)
        return losses.Contrastive(model)

    def batch_for(self, name: str, model) -> list[dict]:
        return one_column(model) if name == "distillation" else batch_of(model)

    def with_gradcache(self, model, **options) -> tuple[nn.Module, nn.Module]:
        """A loss with GradCache, and the one of the whole batch."""
        cached = losses.CachedContrastive(model, mini_batch_size=2, size_average=False, **options)
        return cached, losses.Contrastive(model, size_average=False, **options)

    def gathered(self, model, ranks: int) -> tuple[nn.Module, float]:
        """The contrastive loss over the documents of all ranks with temperature 0.5, and how many times that it is."""
        return losses.Contrastive(model, gather_across_devices=True, temperature=0.5), float(ranks)

    def both(self, model) -> nn.Module:
        """What ContrastiveDistillation computes with ``OPTIONS``."""
        loss = self.loss("distillation", model)
        loss.score_metric = lambda *args, **kwargs: losses.distillation.colbert_kd_scores(*args, **kwargs) / 0.5

        def distillation(_columns, labels):
            return loss(one_column(model), labels / 0.25)

        return Weighted(model, (0.7, losses.Contrastive(model, temperature=0.5)), (3.0, distillation))

    def over_cut_models(self, loss: nn.Module) -> nn.Module:
        def cut(dim, tokens, model, args, _given, output):
            is_query = args[0]["input_ids"].shape[1] == model.query_length
            if tokens is not None and not is_query:
                _, live = losses.contrastive.extract_skiplist_mask([args[0], args[0]], model.skiplist)
                args[0]["attention_mask"] = (live & (live.cumsum(1) <= tokens)).long()
            return {**output, "token_embeddings": output["token_embeddings"][..., :dim]}

        return OverCutModels(loss, cut)

    def train(self, model, loss, folder: Path) -> list[float]:
        return training_runs.train(model, loss, training_runs.candidates(), folder, eval_strategy="epoch")


class MultiVector(Host):
    # Scores are float32 in a model in float64 too.
    tolerance, unit_means = 3e-6, True
    losses = "contrastive", "contrastive in mini-batches", "contrastive, mean", "contrastive by XTR"
    losses += "distillation", "margins"

    def columns(self, model, *texts: list[str]) -> list[dict]:
        tasks = ["query", *["document"] * (len(texts) - 1)]
        return [{**model.preprocess(each, task=task), "task": task} for each, task in zip(texts, tasks, strict=True)]

    def loss(self, name: str, model) -> nn.Module:
        loss_class, options = multi_vector.LOSSES[name]
        return loss_class(model, **({} if name == "distillation" else options))

    def with_gradcache(self, model, **options) -> tuple[nn.Module, nn.Module]:
        cached = multi_vector.CACHED(model, mini_batch_size=3, **options)
        return cached, multi_vector.CONTRASTIVE(model, **options)

    def gathered(self, model, ranks: int) -> tuple[nn.Module, float]:
        return multi_vector.CONTRASTIVE(model, scale=2.0, gather_across_devices=True), 1.0

    def both(self, model) -> nn.Module:
        contrastive = multi_vector.CONTRASTIVE(model, scale=2.0)
        distillation = multi_vector.DISTILLATION(model, student_temperature=0.5, teacher_temperature=0.25)
        # It is times the square of its student temperature.
        return Weighted(model, (0.7, lambda columns, _: contrastive(columns)), (3.0 / 0.25, distillation))

    def over_cut_models(self, loss: nn.Module) -> nn.Module:
        def cut(dim, tokens, _model, _args, given, output):
            embeddings, mask = output["token_embeddings"][..., :dim], output["attention_mask"].bool()
            if tokens is not None and given["task"] == "document":
                mask = mask & (mask.cumsum(1) <= tokens)
            return {**output, "token_embeddings": F.normalize(embeddings, dim=-1), "attention_mask": mask}

        return OverCutModels(loss, cut)

    def train(self, model, loss, folder: Path) -> list[float]:
        trainer_class, arguments_class = self.steps.trainer
        options = {"per_device_train_batch_size": 3, "max_steps": 4, "logging_steps": 1, "report_to": "none"}
        arguments = arguments_class(str(folder), use_cpu=True, disable_tqdm=True, **options)
        rows = dict(zip(("query", "positive", "negative_1", "negative_2"), TEXTS, strict=True))
        data = Dataset.from_dict({**rows, "label": LABELS.tolist()})
        trainer = trainer_class(model=model, args=arguments, train_dataset=data, loss=loss)
        trainer.train()
        trainer.save_model(str(folder / "saved"))
        assert type(loss).__name__ in (folder / "saved" / "README.md").read_text(encoding="utf-8")
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


HOST = PyLate("PyLate") if training_runs else MultiVector("MultiVectorEncoder")


def batch_of(model) -> list[dict]:
    return HOST.columns(model, *TEXTS)


def one_column(model) -> list[dict]:
    """The same with all documents of a query one after the other."""
    return HOST.columns(model, TEXTS[0], [text for row in zip(*TEXTS[1:], strict=True) for text in row])
