"""Choices of a configuration of ``fuzz.py``, and its batches: texts and labels, or vectors."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import TEXT

BATCHES = 2

WORDS = TEXT.split()
UNICODE = ["naïve", "日本語", "Ärger", "🙂", "e\u0301", "Ωmega", "العربية", "\u200b", "ﬁsh"]


class Draw:
    """Choices of a configuration, each from random numbers of its own, so that some can be ``fixed`` and others stay."""

    def __init__(self, seed: int, fixed: dict[str, object] | None = None) -> None:
        self.seed, self.fixed = seed, fixed or {}
        self.words: dict[str, object] = {}

    def random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def __call__(self, name: str, default: object, *others: object, often: float = 0.7) -> object:
        """``default`` with the probability ``often``, or one of the others, which the words then say."""
        if name in self.fixed:
            value = self.fixed[name]
        else:
            generator = self.random(name)
            value = default if not others or generator.random() < often else generator.choice(others)
        if value != default:
            self.words[name] = value
        return value

    def any(self, name: str, *values: object) -> object:
        """Any of them, and the words say which."""
        value = self.fixed[name] if name in self.fixed else self.random(name).choice(values)
        self.words[name] = value
        return value

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.words.items())


def texts_of(draw: Draw, batch: int, columns: int) -> list[list[str]]:
    """The queries of a batch, and columns of documents."""
    count = draw.random(f"texts {batch}").randint(2, 4)
    longest = draw.random(f"longest {batch}").choice([5, 20, 40, 80])
    made = [_texts(draw, batch, "queries", count, min(8, longest))]
    return made + [_texts(draw, batch, f"column {place}", count, longest) for place in range(columns)]


def _texts(draw: Draw, batch: int, column: str, count: int, longest: int) -> list[str]:
    kinds = "uneven", "equal", "one word", "one empty", "unicode", "repeated", "full"
    kind = draw(f"{column} of batch {batch}", *kinds, often=0.6)
    generator = draw.random(f"words of {column} {batch}")
    words = UNICODE + WORDS[:9] if kind == "unicode" else WORDS

    def text() -> str:
        length = {"equal": longest // 2, "one word": 1, "full": 80}.get(
            kind, 1 + int(longest * generator.random() ** 2)
        )
        return " ".join(generator.choice(words) for _ in range(length))

    made = [text() for _ in range(count)]
    if kind == "one empty":
        made[generator.randrange(count)] = ""
    return [made[0]] * count if kind == "repeated" else made


def labels_of(queries: int, documents: int) -> Tensor:
    """A teacher's scores."""
    return torch.linspace(0, 3, queries * documents, dtype=torch.float64).sin().view(queries, documents)


def change_documents(draw: Draw, columns: list[dict]) -> None:
    """Gaps in masks of documents; only to explain ties: another first token for each."""
    for number, column in enumerate(columns[1:]):
        if draw("gaps in masks", False, True, often=0.93):
            column["attention_mask"][::2, 2:4] = 0
            column.pop("token_total", None)  # as the package asks of code that changes masks
        if draw("distinct", False):
            ids = column["input_ids"]
            ids[:, 0] = torch.arange(len(ids)) + 20 * number + 20


class Vectors(nn.Module):
    """What a model of colpali-engine gives for each batch: unit vectors, with zeros in the place of padding."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        side = draw("padding", "left", "right", "between", "none", often=0.4)
        shift = draw("similarities", 1.0, 0.0, often=0.6)
        gathered = draw("documents of other ranks", 0, 3, often=0.7)
        dim = draw("dimensions", 16, 8, 3, often=0.5)
        self.masks: dict[str, Tensor] = {}
        self.leaves = nn.ParameterDict()
        for batch in range(BATCHES):
            count, ways, queries, pages = (
                draw.random(f"{name} {batch}").randint(*most)
                for name, most in {"queries": (2, 5), "ways": (1, 3), "query length": (2, 7), "length": (3, 12)}.items()
            )
            generator = torch.Generator().manual_seed(draw.seed + batch)
            for name, shape in {
                "query": (count, queries),
                "doc": (count + gathered, pages),
                "neg_doc": (count, ways, pages),
            }.items():
                values = torch.randn(*shape, dim, generator=generator, dtype=torch.float64) + shift
                if draw("repeated pages", False, True, often=0.9) and name == "doc":
                    values[1:] = values[:1]
                self.leaves[f"{name} {batch}"] = nn.Parameter(values)
                length = torch.randint(1, shape[-1] + 1, shape[:-1], generator=generator)[..., None]
                place = torch.arange(shape[-1])
                live = {
                    "left": place >= shape[-1] - length,
                    "right": place < length,
                    "between": torch.rand(shape, generator=generator) < 0.6,
                    "none": torch.ones(shape, dtype=torch.bool),
                }[side]
                live[..., 0] |= ~live.any(-1)
                self.masks[f"{name} {batch}"] = live.double()[..., None]

    def forward(self, name: str, batch: int) -> Tensor:
        return F.normalize(self.leaves[f"{name} {batch}"], dim=-1) * self.masks[f"{name} {batch}"]
