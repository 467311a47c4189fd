"""What ``fuzz.py`` draws from: modules, hooks, losses, options and batches of each host."""

from __future__ import annotations

import atexit
import copy
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim import LogSumExp, Max, PooledScores, Softmax, TopK
from tests.support.models import TEXT, build_model

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


# Modules, hooks and forwards. A change is given token embeddings [N, L, d].


def scaled(tokens: Tensor) -> Tensor:
    return 1.5 * tokens + 0.1


def centred(tokens: Tensor) -> Tensor:
    """Minus the mean over the tokens of each text, padding included."""
    return tokens - tokens.mean(dim=-2, keepdim=True)


def less_the_batch(tokens: Tensor) -> Tensor:
    return tokens - tokens.flatten(0, -2).mean(0)


class Activation(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, tokens: Tensor) -> Tensor:
        return self.change(tokens)


class Own(nn.Module):
    """A module of the user's own behind the encoder; ``change`` is given itself, token embeddings and their mask."""

    def __init__(self, change: Callable[[Own, Tensor, Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.change, self.layer, self.calls = change, layer, 0

    def forward(self, features: dict, **_: object) -> dict:
        tokens = self.change(self, features["token_embeddings"], features["attention_mask"])
        self.calls += self.training
        return {**features, "token_embeddings": tokens}


def over_tokens(own: Own, tokens: Tensor, _: Tensor) -> Tensor:
    return own.layer(tokens.transpose(1, 2)).transpose(1, 2)


def less_its_text(_: Own, tokens: Tensor, mask: Tensor) -> Tensor:
    weights = mask.to(tokens)[..., None]
    return tokens - (tokens * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)


class WithLengths(nn.Module):
    """Lengths for Sentence Transformers' LSTM, which its Transformer does not count."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: dict, **_: object) -> dict:
        found = self.inner({**features, "sentence_lengths": features["attention_mask"].sum(1)})
        missing = features["attention_mask"].shape[1] - found["token_embeddings"].shape[1]
        return {**found, "token_embeddings": F.pad(found["token_embeddings"], (0, 0, 0, missing))}


def of_library(name: str) -> type[nn.Module]:
    try:
        from sentence_transformers.sentence_transformer import modules as library
    except ImportError:  # before release 5.4
        from sentence_transformers import models as library
    return getattr(library, name)


def word_weights(width: int, vocabulary: list[str], smallest: float = 0.0) -> nn.Module:
    generator = random.Random(0)
    weights = {word: generator.choice([0.5, 1.0, 1.0, 2.0, smallest]) for word in vocabulary}
    return of_library("WordWeights")(vocabulary, weights)


# Modules by what they do to texts, and what makes them of the width and the vocabulary.
MODULES: dict[str, Callable[[int, list[str]], nn.Module]] = {
    "nn.Sequential": lambda width, _: nn.Sequential(Own(lambda _, tokens, __: tokens.tanh())),
    "WordWeights": word_weights,
    "WordWeights without zeros": partial(word_weights, smallest=0.3),
    "CNN": lambda width, _: of_library("CNN")(width, width // 2, [1, 3]),
    "LSTM": lambda width, _: WithLengths(of_library("LSTM")(width, width // 2)),
    "own tanh": lambda width, _: Own(lambda _, tokens, __: tokens.tanh()),
    "own Conv1d": lambda width, _: Own(over_tokens, nn.Conv1d(width, width, 3, padding=1)),
    "own mean with padding": lambda width, _: Own(lambda _, tokens, __: centred(tokens)),
    "own mean of the text": lambda width, _: Own(less_its_text),
}
MIXING_TEXTS = {
    "own mean of the batch": lambda width, _: Own(lambda _, tokens, __: less_the_batch(tokens)),
    "own BatchNorm1d": lambda width, _: Own(over_tokens, nn.BatchNorm1d(width)),
    "own count of calls": lambda width, _: Own(lambda own, tokens, _: tokens + own.calls * tokens.roll(1, -1)),
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "Softmax(dim=1)": partial(nn.Softmax, dim=1),
    "Softmax(dim=-1)": partial(nn.Softmax, dim=-1),
    "own tanh": partial(Activation, torch.tanh),
    "own mean over tokens": partial(Activation, centred),
}
# Kinds of hooks; the last ones depend on all texts of a call.
HOOKS = ("looks", "scales", "scales what goes in", "centres", "scales gradients", "new forward scales")
HOOKS_MIXING_TEXTS = ("penalty", "takes the mean of the batch", "new forward takes the mean of the batch")


def changed(value: object, change: Callable[[Tensor], Tensor]) -> object:
    """What a module returns or is given, with its token embeddings changed."""
    match value:
        case Tensor():
            return change(value) if value.is_floating_point() and value.dim() > 1 else value
        case tuple():
            return (changed(value[0], change), *value[1:]) if value else value
        case dict():
            for key in ("token_embeddings", "last_hidden_state", "logits"):
                if value.get(key) is not None:
                    return type(value)({**value, key: change(value[key])})
    return value


def place_hook(module: nn.Module, kind: str, penalties: list[Tensor]) -> None:
    change = {"centres": centred}.get(kind, less_the_batch if "batch" in kind else scaled)
    match kind:
        case "looks":
            module.register_forward_hook(lambda *_: None)
        case "scales what goes in":
            module.register_forward_pre_hook(lambda _, args: changed(args, change))
        case "scales gradients":
            module.register_full_backward_hook(
                lambda _, given, __: tuple(each if each is None else 2 * each for each in given)
            )
        case "penalty":

            def collect(_, __, output):
                changed(output, lambda tokens: penalties.append(tokens.square().mean()) or tokens)

            module.register_forward_hook(collect)
        case "new forward scales" | "new forward takes the mean of the batch":
            stock = module.forward
            module.forward = lambda *args, **kwargs: changed(stock(*args, **kwargs), change)
        case _:
            module.register_forward_hook(lambda _, __, output: changed(output, change))


# Hosts.


@dataclass
class Training:
    """A model, and the loss of each of its batches."""

    model: nn.Module
    loss_of: Callable[[int], Tensor]
    penalties: list[Tensor] = field(default_factory=list)


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def encoder_folder(family: str, masked_lm: bool = False) -> str:
    return build_model(_folder() / f"{family}-{masked_lm}", family, masked_lm=masked_lm)


def copied(model: nn.Module, seed: int) -> nn.Module:
    """A model to train, with the tokenizer of the original. Weights of modules that are added are those of the seed."""
    torch.manual_seed(seed)
    return copy.deepcopy(model, {id(model.tokenizer): model.tokenizer})


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


class Host:
    """What is drawn for a library. Draws have names, so that a second call makes the same model again."""

    name: str
    families: tuple[str, ...]

    def options(self, draw: Draw) -> dict[str, object]:
        """Of ``enable()``."""
        return {"padding_free": draw("padding_free", True, False, "always", often=0.65)}

    def build(self, draw: Draw, stock: bool) -> Training:
        raise NotImplementedError

    def explanations(self, draw: Draw) -> Iterator[tuple[str, dict[str, object]]]:
        """Documented differences that the configuration may show, and what to fix so that it does not."""
        return iter(())

    def places(self, model: nn.Module) -> dict[str, nn.Module]:
        """Modules for hooks."""
        encoder = self.encoder(model)
        layers = next(module for module in encoder.modules() if isinstance(module, nn.ModuleList))
        places = {"model": model, "Transformer": model[0], "encoder": encoder, "layer": layers[0]}
        places |= {type(module).__name__: module for module in list(model)[1:]}
        return places | {f"{name}.linear": part.linear for name, part in places.items() if hasattr(part, "linear")}

    def encoder(self, model: nn.Module) -> nn.Module:
        return model[0].auto_model

    def mixes(self, draw: Draw) -> bool:
        """Whether modules and hooks may mix texts: not where the user says that they do not."""
        return self.options(draw)["padding_free"] != "always"

    def hook(self, draw: Draw, model: nn.Module, cached: bool) -> list[Tensor]:
        penalties: list[Tensor] = []
        # GradCache: a penalty of the second pass comes after the loss.
        mixing = HOOKS_MIXING_TEXTS[cached:] if self.mixes(draw) else ()
        kind = draw("hook", None, *HOOKS, *mixing, often=0.82)
        if kind is not None:
            places = self.places(model)
            name = draw.any("on", *places)
            place_hook(places[name], kind, penalties)
        return penalties

    def train(self, draw: Draw, model: nn.Module) -> None:
        model.double().train(not draw("in evaluation", False, True, often=0.93))
        if draw("checkpointing", False, True, often=0.88):
            self.encoder(model).gradient_checkpointing_enable({"use_reentrant": False})


# Documented differences of XTR scores, and what to fix so that they do not show.
XTR = (
    ("XTR passes all ties", {"distinct": True}),
    ("stock's XTR passes masked tokens where k is above the live ones", {"distinct": True, "k": 1}),
)


def of_xtr(draw: Draw) -> Iterator[tuple[str, dict[str, object]]]:
    """These differences with what a configuration has besides: similarities to a row of zeros are equal as well.

    ReLU leaves such rows where Matryoshka cuts vectors short.
    """
    weighted = str(draw.words.get("module")).startswith("WordWeights")
    zeros = {"module": None} if weighted else {}
    if draw.words.get("activation") == "ReLU":
        zeros["activation"] = None
    return ((reason, {**fixed, **zeros}) for reason, fixed in XTR)


class LateInteraction(Host):
    """Modules behind the encoder, which PyLate and a MultiVectorEncoder share."""

    families = (
        *("bert", "modernbert", "xlm-roberta", "distilbert", "mpnet", "electra", "deberta", "bigbird"),
        *("qwen3", "llama", "lfm2", "t5", "convbert", "longrope", "ministral3"),
    )

    def loss_names(self, draw: Draw) -> list[str]:
        """The loss, and what is inside of it."""
        name = draw.any("loss", *self.losses)
        return [name, draw.any("inner", *self.losses[:-1])] if name == "Matryoshka" else [name]

    def change_modules(self, draw: Draw, model: nn.Module) -> None:
        dense = next(module for module in model if hasattr(module, "linear"))
        width, out = dense.linear.in_features, dense.linear.out_features
        if draw("Dense without bias" if dense.linear.bias is not None else "Dense with bias", False, True, often=0.7):
            dense.linear = nn.Linear(width, out, bias=dense.linear.bias is None)
        if draw("residual", False, True, often=0.85):
            dense.use_residual, dense.residual = True, nn.Linear(width, out, bias=False)
        if activation := draw("activation", None, *ACTIVATIONS, often=0.82):
            dense.activation_function = ACTIVATIONS[activation]()
        mixing = MIXING_TEXTS if self.mixes(draw) else {}
        if name := draw("module", None, *MODULES, *mixing, often=0.75):
            behind = draw("behind Dense", True, False, often=0.5)
            vocabulary = list(map(str, range(self.encoder(model).get_input_embeddings().num_embeddings)))
            module = {**MODULES, **MIXING_TEXTS}[name](out if behind else width, vocabulary)
            model.insert(list(model).index(dense) + behind, module)


class PyLate(LateInteraction):
    name = "pylate"
    losses = ("Contrastive", "CachedContrastive", "Distillation", "ContrastiveDistillation", "Matryoshka")
    poolings = (Max(), TopK(3), Softmax(0.3), LogSumExp(0.1))

    def options(self, draw: Draw) -> dict[str, object]:
        options = super().options(draw)
        # What stock has without this package knows no masking of stock's.
        own, metric = self.loss_names(draw)[-1] == "ContrastiveDistillation", self.metric(draw)
        options["pooling"] = Max() if metric or own else draw("pooling", *self.poolings, often=0.8)
        masking = not own and metric in (None, "own") and draw("stock_masking", True, False, often=0.9)
        options["stock_masking"] = bool(masking and options["pooling"] == Max())
        return options

    def metric(self, draw: Draw) -> str | None:
        if self.loss_names(draw)[-1] == "ContrastiveDistillation":
            return None
        return draw("metric", None, "XTR", "PooledScores", "own", often=0.6)

    def explanations(self, draw: Draw) -> Iterator[tuple[str, dict[str, object]]]:
        if draw.words.get("metric") == "XTR":
            yield from of_xtr(draw)
        if draw.words.get("module") == "WordWeights":
            yield "a masked token wins over a live one that is exactly 0", {"module": "WordWeights without zeros"}
        if "stock_masking" in draw.words:
            yield "stock lets masked tokens win", {"stock_masking": True}

    def score_metric(self, draw: Draw, stock: bool, own_documents: bool) -> Callable | None:
        from pylate import scores

        from tests.support.pooled_definitions import PlainScores

        match self.metric(draw):
            case "XTR":
                kind = scores.XTRKDScores if own_documents else scores.XTRScores
                return kind(draw("k", 9, 1, 40, 100, 400))
            case "PooledScores":
                pooling = draw("pooling of the metric", *self.poolings, often=0.25)
                normalize = draw("length_normalize", False, True, often=0.5)
                return PooledScores(pooling, length_normalize=normalize, own_documents=own_documents)
            case "own":
                metric = scores.colbert_kd_scores if own_documents else scores.ColBERTScores()
                return lambda *args, **kwargs: metric(*args, **kwargs).sinh()
        pooling = self.options(draw)["pooling"]
        if stock and pooling != Max():
            return PlainScores(PooledScores(pooling, own_documents=own_documents))
        return None

    def loss(self, draw: Draw, model: nn.Module, stock: bool, name: str) -> nn.Module:
        from pylate import losses

        from pylate_fastmaxsim import losses as own

        temperature = draw("temperature", 1.0, 0.1, 0.02)
        size_average = draw("size_average", True, False, often=0.8)
        metric = partial(self.score_metric, draw, stock)
        match name:
            case "Contrastive" | "CachedContrastive":
                options = {"temperature": temperature, "size_average": size_average, "score_metric": metric(False)}
                options["score_mini_batch_size"] = draw("score_mini_batch_size", None, 2, often=0.8)
                if name == "CachedContrastive":
                    options["mini_batch_size"] = draw.any("mini_batch_size", 1, 2, 3, 3, 32)
                return getattr(losses, name)(model, **options)
            case "Distillation":
                options = {"score_metric": found} if (found := metric(True)) else {}
                normalize = draw("normalize_scores", True, False, often=0.6)
                return losses.Distillation(model, size_average=size_average, normalize_scores=normalize, **options)
            case "ContrastiveDistillation":
                sizes = draw("GradCache", {}, {"mini_batch_size": 2}, {"mini_batch_tokens": 60}, often=0.5)
                return own.ContrastiveDistillation(model, temperature=temperature, **sizes)
            case "Matryoshka":
                inner = self.loss(draw, model, stock, self.loss_names(draw)[1])
                tokens = draw("document_tokens", None, (None, 3), often=0.6)
                return own.Matryoshka(model, inner, (16, 8), document_tokens=tokens)

    @cache  # noqa: B019, there is one host of a class
    def template(self, family: str) -> nn.Module:
        from tests.support.models import load_model

        return load_model(encoder_folder(family))

    def model(self, draw: Draw) -> nn.Module:
        original = self.template(draw("family", *self.families, often=0.3))
        model = copied(original, draw.seed)
        model.document_length, model.query_length = draw("lengths", (32, 12), (61, 12), (20, 24), (48, 4), (61, 40))
        if not draw("query expansion", True, False, often=0.6):
            model.do_query_expansion = False
        elif draw("attends to expansion", False, True, often=0.7):
            model.attend_to_expansion_tokens = True
        if not draw("skiplist", True, False):
            model.skiplist = []
        if not draw("prefixes", True, False, often=0.85):
            model.query_prefix_id = model.document_prefix_id = None
        self.change_modules(draw, model)
        return model

    def build(self, draw: Draw, stock: bool) -> Training:
        from tests.support.models import collated, features

        model, names = self.model(draw), self.loss_names(draw)
        self.train(draw, model)
        loss = self.loss(draw, model, stock, names[0])
        penalties = self.hook(draw, model, cached="CachedContrastive" in names or "GradCache" in draw.words)
        distils = names[-1] == "Distillation"
        columns = draw("columns", 2, 1, 3, 4, often=0.5)
        columns = max(2, columns) if "Distillation" in names[-1] else columns
        collate = partial(collated, prompts={"query": "find: ", "document_0": "text: "})
        collate = {"none": features, "prompts": collate}.get(draw("collator", "plain", "none", "prompts"), collated)

        def loss_of(batch: int) -> Tensor:
            queries, *documents = texts_of(draw, batch, columns)
            if distils:
                documents = [[text for texts in zip(*documents, strict=True) for text in texts]]
            rows = (features if distils else collate)(model, queries, *documents)
            change_documents(draw, rows)
            return loss(rows, labels_of(len(queries), columns))

        return Training(model, loss_of, penalties)


class MultiVector(LateInteraction):
    name = "multi_vector"
    losses = ("ranking", "cached ranking", "KL divergence", "margins", "ContrastiveDistillation", "Matryoshka")

    def explanations(self, draw: Draw) -> Iterator[tuple[str, dict[str, object]]]:
        return of_xtr(draw) if draw.words.get("similarity") == "XTR" else iter(())

    def loss(self, draw: Draw, model: nn.Module, name: str) -> nn.Module:
        from sentence_transformers.multi_vector_encoder import losses, scoring

        from pylate_fastmaxsim import losses as own

        similarity, k = draw("similarity", "MaxSim", "mean", "XTR", often=0.6), draw("k", 9, 1, 40, 100, 400)

        def options(mean: Callable, xtr: Callable) -> dict[str, object]:
            return {"MaxSim": {}, "mean": {"similarity_fct": mean}, "XTR": {"similarity_fct": xtr}}[similarity]

        contrastive = options(scoring.mean_colbert_scores, scoring.XTRScores(k))
        temperature = draw("temperature", 1.0, 0.1, 0.02)
        match name:
            case "ranking":
                sizes = {key: draw(key, None, 2, 3, often=0.8) for key in ("mini_batch_size", "score_mini_batch_size")}
                return losses.MultiVectorMultipleNegativesRankingLoss(
                    model, scale=1 / temperature, **contrastive, **sizes
                )
            case "cached ranking":
                sizes = {"mini_batch_size": draw.any("mini_batch_size", 1, 2, 3, 3, 32)}
                sizes["mini_batch_num_tokens"] = draw("mini_batch_num_tokens", None, 60)
                return losses.CachedMultiVectorMultipleNegativesRankingLoss(
                    model, scale=1 / temperature, **contrastive, **sizes
                )
            case "KL divergence":
                similarity = options(scoring.mean_colbert_kd_scores, scoring.XTRKDScores(k))
                return losses.MultiVectorDistillKLDivLoss(model, temperature=temperature, **similarity)
            case "margins":
                similarity = options(scoring.mean_colbert_scores_pairwise, scoring.xtr_scores_pairwise)
                return losses.MultiVectorMarginMSELoss(model, **similarity)
            case "ContrastiveDistillation":
                sizes = draw("GradCache", {}, {"mini_batch_size": 2}, {"mini_batch_tokens": 60}, often=0.5)
                return own.ContrastiveDistillation(model, temperature=temperature, **sizes)
            case "Matryoshka":
                inner = self.loss(draw, model, self.loss_names(draw)[1])
                tokens = draw("document_tokens", None, (None, 3), often=0.6)
                return own.Matryoshka(model, inner, (16, 8), document_tokens=tokens)

    @cache  # noqa: B019, there is one host of a class
    def template(self, family: str) -> nn.Module:
        from sentence_transformers import MultiVectorEncoder

        torch.manual_seed(0)
        return MultiVectorEncoder(encoder_folder(family), device="cpu")

    def model(self, draw: Draw) -> nn.Module:
        original = self.template(draw("family", *self.families, often=0.3))
        model = copied(original, draw.seed)
        model[0].max_seq_length = draw("length", 32, 20, 61)
        if strategy := draw("query expansion", None, "fixed", "min", often=0.8):
            attend = draw("attends to expansion", False, True)
            model[0].query_expansion = {"strategy": strategy, "attend": attend, "length": 10}
        for module in model:
            if hasattr(module, "skiplist_words") and draw("skiplist", False, True):
                module.skiplist_words = list(".,!?():")
                module.resolve_with_tokenizer(model.tokenizer)
        self.change_modules(draw, model)
        if draw("token pooling", False, True, often=0.9):
            from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

            model.append(HierarchicalTokenPooling(pool_factor=2))
        if draw("router", False, True, often=0.9):
            from sentence_transformers import MultiVectorEncoder
            from sentence_transformers.base.modules import Router

            routes = list(model), list(copied(model, draw.seed))
            return MultiVectorEncoder(modules=[Router.for_query_document(*routes)], device="cpu")
        return model

    def encoder(self, model: nn.Module) -> nn.Module:
        first = model[0]
        return (first.sub_modules["document"][0] if hasattr(first, "sub_modules") else first).auto_model

    def build(self, draw: Draw, stock: bool) -> Training:
        model, names = self.model(draw), self.loss_names(draw)
        self.train(draw, model)
        loss = self.loss(draw, model, names[0])
        penalties = self.hook(draw, model, cached="cached ranking" in names or "GradCache" in draw.words)
        columns = draw("columns", 2, 1, 3, 4, often=0.5)
        columns = max(2, columns) if names[-1] in ("KL divergence", "margins") else columns
        prompt = draw("prompt", None, "text: ", often=0.8)

        def loss_of(batch: int) -> Tensor:
            parts = texts_of(draw, batch, columns)
            rows = [
                {**model.preprocess(part, task=task, prompt=prompt), "task": task}
                for part, task in zip(parts, ["query"] + ["document"] * columns, strict=True)
            ]
            change_documents(draw, rows)
            labels = labels_of(len(parts[0]), columns)
            return loss(rows, labels[:, 1:] if names[-1] == "margins" and columns > 2 else labels)

        return Training(model, loss_of, penalties)


class Sparse(Host):
    name = "sparse"
    families = ("bert", "modernbert", "xlm-roberta", "distilbert", "mpnet", "electra", "deberta", "bigbird", "convbert")
    # Of each base loss its class, its options, its numbers of columns, and the form of its labels.
    losses = {
        "ranking": ("SparseMultipleNegativesRankingLoss", {}, (2, 3, 4), None),
        "KL divergence": ("SparseDistillKLDivLoss", {"temperature": 0.5}, (3, 4), "documents"),
        "margins": ("SparseMarginMSELoss", {}, (3, 4), "negatives"),
        "triplets": ("SparseTripletLoss", {}, (3,), None),
        "CoSENT": ("SparseCoSENTLoss", {}, (2,), "pairs"),
        "AnglE": ("SparseAnglELoss", {}, (2,), "pairs"),
        "cosine": ("SparseCosineSimilarityLoss", {}, (2,), "pairs"),
    }

    @cache  # noqa: B019, there is one host of a class
    def template(self, family: str, kind: str) -> nn.Module:
        from tests.support import sparse_encoders
        from tests.support.sparse_encoders import Router, SpladePooling, _sparse_encoder, masked_lm

        path = encoder_folder(family, masked_lm=True)
        if kind == "two routes":
            transformer = masked_lm(path)
            return _sparse_encoder(Router.for_query_document([transformer], [transformer]), SpladePooling())
        return getattr(sparse_encoders, kind)(path)

    def explanations(self, draw: Draw) -> Iterator[tuple[str, dict[str, object]]]:
        if draw.words.get("base loss") == "triplets":
            # sqrt(0) in Sentence Transformers' distance; its padding makes equal texts differ by rounding.
            yield (
                "triplets of equal texts have NaN gradients, unless rounding hides that they are equal",
                {"distinct": True},
            )

    def encoder(self, model: nn.Module) -> nn.Module:
        from tests.support.sparse_encoders import transformer_of

        return transformer_of(model).auto_model

    def places(self, model: nn.Module) -> dict[str, nn.Module]:
        base = getattr(self.encoder(model), self.encoder(model).base_model_prefix)
        return super().places(model) | {"base": base, "decoder": self.encoder(model).get_output_embeddings()}

    def model(self, draw: Draw) -> nn.Module:
        kind = draw("model", "splade", "inference_free", "two routes", often=0.8)
        original = self.template(draw("family", *self.families, often=0.3), kind)
        model = copied(original, draw.seed)
        if kind == "splade":
            model[1].activation_function = draw("activation", "relu", "log1p_relu", often=0.8)
            model[1].pooling_strategy = draw("pooling", "max", "sum", often=0.9)
        for module in model.modules():
            if hasattr(module, "max_seq_length"):
                module.max_seq_length = draw("length", 32, 20, 61)
        return model

    def build(self, draw: Draw, stock: bool) -> Training:
        from sentence_transformers.sparse_encoder import losses

        from tests.support.splade_steps import batch_of

        model = self.model(draw)
        self.train(draw, model)
        class_name, options, counts, form = self.losses[draw("base loss", *self.losses, often=0.4)]
        base = getattr(losses, class_name)(model, **options)
        wrap = draw("loss", "SpladeLoss", "CachedSpladeLoss")
        weights = {"document_regularizer_weight": 3e-2}
        if draw.words.get("model") != "inference_free":
            weights["query_regularizer_weight"] = 5e-2
        if draw("threshold", False, True, often=0.8):
            weights["document_regularizer_threshold"] = 150
        if wrap == "CachedSpladeLoss":
            weights["mini_batch_size"] = draw.any("mini_batch_size", 1, 2, 3, 3, 32)
        loss = getattr(losses, wrap)(model, base, **weights)
        penalties = self.hook(draw, model, cached=wrap == "CachedSpladeLoss")
        columns = draw.any("columns", *counts)

        def loss_of(batch: int) -> Tensor:
            parts = texts_of(draw, batch, columns - 1)
            rows = batch_of(model, columns, parts)
            change_documents(draw, rows)
            labels = labels_of(len(parts[0]), columns)
            labels = {
                None: None,
                "pairs": labels[:, 0],
                "documents": labels[:, 1:],
                "negatives": labels[:, 1] if columns == 3 else labels[:, 2:],
            }[form]
            value = loss(rows, labels)
            return sum(value.values()) if isinstance(value, dict) else value

        return Training(model, loss_of, penalties)


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


class ColPali(Host):
    name = "colpali"
    losses = (
        *("ColbertLoss", "ColbertPairwiseCELoss", "ColbertSigmoidLoss"),
        *("ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss"),
    )

    def options(self, draw: Draw) -> dict[str, object]:
        return {}

    def build(self, draw: Draw, stock: bool) -> Training:
        from colpali_engine import loss as colpali_losses

        model, name = Vectors(draw), draw.any("loss", *self.losses)
        options = {"temperature": draw("temperature", 0.5, 0.02, 1.0, often=0.5)}
        options["normalize_scores"] = draw("normalize_scores", True, False)
        options["use_smooth_max"] = draw("use_smooth_max", False, True)
        options["tau"] = draw("tau", 0.1, 0.02, 0.3)
        options["pos_aware_negative_filtering"] = draw("pos_aware_negative_filtering", False, True)
        if with_negatives := "Negative" in name:
            options["in_batch_term_weight"] = draw("in_batch_term_weight", 0.5, 0.0, 1.0)
        loss = getattr(colpali_losses, name)(**options)
        others = len(model.leaves["doc 0"]) - len(model.leaves["query 0"])
        offset = draw("offset", 0, others, often=0.5)

        def loss_of(batch: int) -> Tensor:
            names = ["query", "doc", "neg_doc"][: 2 + with_negatives]
            return loss(**{f"{each}_embeddings": model(each, batch) for each in names}, offset=offset)

        return Training(model, loss_of)


HOSTS = {host.name: host for host in (PyLate(), MultiVector(), Sparse(), ColPali())}
