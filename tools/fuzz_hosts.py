"""What ``fuzz.py`` draws from: models, losses and options of each host; what is added to them: ``fuzz_modules.py``."""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

from pylate_fastmaxsim import LogSumExp, Max, PooledScores, Softmax, TopK
from tests.support.models import build_model, collated, features, load_model
from tools.fuzz_draws import Draw, Vectors, change_documents, labels_of, texts_of
from tools.fuzz_modules import ACTIVATIONS, HOOKS, HOOKS_MIXING_TEXTS, MIXING_TEXTS, MODULES, place_hook

# Losses that encode twice, by GradCache.
CACHED = ("CachedContrastive", "cached ranking", "CachedSpladeLoss")


@dataclass
class Training:
    """A model, and the loss of each of its batches."""

    model: nn.Module
    loss_of: Callable[[int], Tensor]
    penalties: list[Tensor] = field(default_factory=list)


@cache
def encoder_folder(family: str, masked_lm: bool = False) -> str:
    folder = tempfile.mkdtemp(prefix="fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build_model(Path(folder), family, masked_lm=masked_lm)


def copied(model: nn.Module, seed: int) -> nn.Module:
    """A model to train, with the tokenizer of the original. Weights of modules that are added are those of the seed."""
    torch.manual_seed(seed)
    return copy.deepcopy(model, {id(model.tokenizer): model.tokenizer})


class Host:
    """What is drawn for a library. Draws have names, so that a second call makes the same model again."""

    name: str

    def options(self, draw: Draw) -> dict[str, object]:
        """Of ``enable()``."""
        return {}

    def build(self, draw: Draw, stock: bool) -> Training:
        raise NotImplementedError

    def explanations(self, draw: Draw) -> Iterator[tuple[str, dict[str, object]]]:
        """Documented differences that the configuration may show, and what to fix so that it does not."""
        return iter(())


class TextHost(Host):
    """A host whose models encode texts.

    It has ``model`` and ``loss``, the number of ``columns`` of documents, and a ``tokenizer`` of queries and columns.
    """

    families: tuple[str, ...]

    def options(self, draw: Draw) -> dict[str, object]:
        return {"padding_free": draw("padding_free", True, False, "always", often=0.65)}

    def labels(self, draw: Draw, queries: int, columns: int) -> Tensor | None:
        return labels_of(queries, columns)

    def build(self, draw: Draw, stock: bool) -> Training:
        model = self.model(draw)
        model.double().train(not draw("in evaluation", False, True, often=0.93))
        if draw("checkpointing", False, True, often=0.88):
            self.encoder(model).gradient_checkpointing_enable({"use_reentrant": False})
        loss = self.loss(draw, model, stock)
        penalties = self.hook(draw, model)
        columns, tokenize = self.columns(draw), self.tokenizer(draw, model)

        def loss_of(batch: int) -> Tensor:
            queries, *documents = texts_of(draw, batch, columns)
            rows = tokenize(queries, *documents)
            change_documents(draw, rows)
            value = loss(rows, self.labels(draw, len(queries), columns))
            return sum(value.values()) if isinstance(value, dict) else value

        return Training(model, loss_of, penalties)

    def encoder(self, model: nn.Module) -> nn.Module:
        first = model[0]
        return (first.sub_modules["document"][0] if hasattr(first, "sub_modules") else first).auto_model

    def places(self, model: nn.Module) -> dict[str, nn.Module]:
        """Modules for hooks."""
        encoder = self.encoder(model)
        layers = next(module for module in encoder.modules() if isinstance(module, nn.ModuleList))
        places = {"model": model, "Transformer": model[0], "encoder": encoder, "layer": layers[0]}
        places |= {type(module).__name__: module for module in list(model)[1:]}
        return places | {f"{name}.linear": part.linear for name, part in places.items() if hasattr(part, "linear")}

    def mixes(self, draw: Draw) -> bool:
        """Whether modules and hooks may mix texts: not where the user says that they do not."""
        return self.options(draw)["padding_free"] != "always"

    def hook(self, draw: Draw, model: nn.Module) -> list[Tensor]:
        penalties: list[Tensor] = []
        # GradCache: a penalty of the second pass comes after the loss.
        cached = "GradCache" in draw.words or any(draw.words.get(name) in CACHED for name in ("loss", "inner"))
        mixing = HOOKS_MIXING_TEXTS[cached:] if self.mixes(draw) else ()
        if kind := draw("hook", None, *HOOKS, *mixing, often=0.82):
            places = self.places(model)
            place_hook(places[draw.any("on", *places)], kind, penalties)
        return penalties


class LateInteraction(TextHost):
    """Modules behind the encoder and losses of this package, which PyLate and a MultiVectorEncoder share.

    Each has ``loss_options``, drawn for every loss, and the ``host_loss`` made with them.
    """

    families = (
        *("bert", "modernbert", "xlm-roberta", "distilbert", "mpnet", "electra", "deberta", "bigbird"),
        *("qwen3", "llama", "lfm2", "t5", "convbert", "longrope", "ministral3"),
    )
    # Losses of queries with several documents of their own.
    distilling: tuple[str, ...]

    def loss_names(self, draw: Draw) -> list[str]:
        """The loss, and what is inside of it."""
        name = draw.any("loss", *self.losses)
        return [name, draw.any("inner", *self.losses[:-1])] if name == "Matryoshka" else [name]

    def loss(self, draw: Draw, model: nn.Module, stock: bool) -> nn.Module:
        from pylate_fastmaxsim import losses

        *outer, name = self.loss_names(draw)
        options = self.loss_options(draw)
        if name == "ContrastiveDistillation":
            sizes = draw("GradCache", {}, {"mini_batch_size": 2}, {"mini_batch_tokens": 60}, often=0.5)
            loss = losses.ContrastiveDistillation(model, temperature=options["temperature"], **sizes)
        else:
            loss = self.host_loss(draw, model, stock, name, **options)
        if outer:
            tokens = draw("document_tokens", None, (None, 3), often=0.6)
            loss = losses.Matryoshka(model, loss, (16, 8), document_tokens=tokens)
        return loss

    def columns(self, draw: Draw) -> int:
        columns = draw("columns", 2, 1, 3, 4, often=0.5)
        return max(2, columns) if self.loss_names(draw)[-1] in self.distilling else columns

    def explanations(self, draw: Draw) -> Iterator[tuple[str, dict[str, object]]]:
        if "XTR" in (draw.words.get("metric"), draw.words.get("similarity")):
            # Similarities to a row of zeros are equal as well: ReLU leaves them where Matryoshka cuts vectors short.
            zeros = {"module": None} if str(draw.words.get("module")).startswith("WordWeights") else {}
            if draw.words.get("activation") == "ReLU":
                zeros["activation"] = None
            distinct = {"distinct": True, **zeros}
            yield "XTR passes all ties", distinct
            yield "stock's XTR passes masked tokens where k is above the live ones", {**distinct, "k": 1}

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
    distilling = ("Distillation", "ContrastiveDistillation")
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
        yield from super().explanations(draw)
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

    def loss_options(self, draw: Draw) -> dict[str, object]:
        temperature = draw("temperature", 1.0, 0.1, 0.02)
        return {"temperature": temperature, "size_average": draw("size_average", True, False, often=0.8)}

    def host_loss(self, draw: Draw, model: nn.Module, stock: bool, name: str, **options: object) -> nn.Module:
        from pylate import losses

        metric = self.score_metric(draw, stock, name == "Distillation")
        if name == "Distillation":
            del options["temperature"]
            options |= {"score_metric": metric} if metric else {}
            options["normalize_scores"] = draw("normalize_scores", True, False, often=0.6)
        else:
            options["score_metric"] = metric
            options["score_mini_batch_size"] = draw("score_mini_batch_size", None, 2, often=0.8)
        if name == "CachedContrastive":
            options["mini_batch_size"] = draw.any("mini_batch_size", 1, 2, 3, 3, 32)
        return getattr(losses, name)(model, **options)

    @cache  # noqa: B019, there is one host of a class
    def template(self, family: str) -> nn.Module:
        return load_model(encoder_folder(family))

    def model(self, draw: Draw) -> nn.Module:
        model = copied(self.template(draw("family", *self.families, often=0.3)), draw.seed)
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

    def tokenizer(self, draw: Draw, model: nn.Module) -> Callable[..., list[dict]]:
        prompted = partial(collated, prompts={"query": "find: ", "document_0": "text: "})
        collate = {"none": features, "prompts": prompted}.get(draw("collator", "plain", "none", "prompts"), collated)
        if self.loss_names(draw)[-1] != "Distillation":
            return partial(collate, model)
        # One column has the documents of all queries.
        return lambda queries, *columns: features(
            model, queries, [text for texts in zip(*columns, strict=True) for text in texts]
        )


class MultiVector(LateInteraction):
    name = "multi_vector"
    losses = ("ranking", "cached ranking", "KL divergence", "margins", "ContrastiveDistillation", "Matryoshka")
    distilling = ("KL divergence", "margins")

    def loss_options(self, draw: Draw) -> dict[str, object]:
        options = {"similarity": draw("similarity", "MaxSim", "mean", "XTR", often=0.6)}
        options["k"] = draw("k", 9, 1, 40, 100, 400)
        return {**options, "temperature": draw("temperature", 1.0, 0.1, 0.02)}

    def host_loss(
        self, draw: Draw, model: nn.Module, stock: bool, name: str, similarity: str, k: int, temperature: float
    ) -> nn.Module:
        from sentence_transformers.multi_vector_encoder import losses, scoring

        def options(mean: Callable, xtr: Callable) -> dict[str, object]:
            return {"MaxSim": {}, "mean": {"similarity_fct": mean}, "XTR": {"similarity_fct": xtr}}[similarity]

        contrastive = {"scale": 1 / temperature, **options(scoring.mean_colbert_scores, scoring.XTRScores(k))}
        match name:
            case "ranking":
                sizes = {key: draw(key, None, 2, 3, often=0.8) for key in ("mini_batch_size", "score_mini_batch_size")}
                return losses.MultiVectorMultipleNegativesRankingLoss(model, **contrastive, **sizes)
            case "cached ranking":
                sizes = {"mini_batch_size": draw.any("mini_batch_size", 1, 2, 3, 3, 32)}
                sizes["mini_batch_num_tokens"] = draw("mini_batch_num_tokens", None, 60)
                return losses.CachedMultiVectorMultipleNegativesRankingLoss(model, **contrastive, **sizes)
            case "KL divergence":
                scores = options(scoring.mean_colbert_kd_scores, scoring.XTRKDScores(k))
                return losses.MultiVectorDistillKLDivLoss(model, temperature=temperature, **scores)
            case "margins":
                scores = options(scoring.mean_colbert_scores_pairwise, scoring.xtr_scores_pairwise)
                return losses.MultiVectorMarginMSELoss(model, **scores)

    @cache  # noqa: B019, there is one host of a class
    def template(self, family: str) -> nn.Module:
        from sentence_transformers import MultiVectorEncoder

        torch.manual_seed(0)
        return MultiVectorEncoder(encoder_folder(family), device="cpu")

    def model(self, draw: Draw) -> nn.Module:
        model = copied(self.template(draw("family", *self.families, often=0.3)), draw.seed)
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

    def tokenizer(self, draw: Draw, model: nn.Module) -> Callable[..., list[dict]]:
        prompt = draw("prompt", None, "text: ", often=0.8)

        def preprocessed(task: str, texts: list[str]) -> dict:
            return {**model.preprocess(texts, task=task, prompt=prompt), "task": task}

        return lambda queries, *columns: [
            preprocessed("query", queries),
            *(preprocessed("document", column) for column in columns),
        ]

    def labels(self, draw: Draw, queries: int, columns: int) -> Tensor:
        labels = labels_of(queries, columns)
        return labels[:, 1:] if self.loss_names(draw)[-1] == "margins" and columns > 2 else labels


class Sparse(TextHost):
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

    def places(self, model: nn.Module) -> dict[str, nn.Module]:
        base = getattr(self.encoder(model), self.encoder(model).base_model_prefix)
        return super().places(model) | {"base": base, "decoder": self.encoder(model).get_output_embeddings()}

    def model(self, draw: Draw) -> nn.Module:
        kind = draw("model", "splade", "inference_free", "two routes", often=0.8)
        model = copied(self.template(draw("family", *self.families, often=0.3), kind), draw.seed)
        if kind == "splade":
            model[1].activation_function = draw("activation", "relu", "log1p_relu", often=0.8)
            model[1].pooling_strategy = draw("pooling", "max", "sum", often=0.9)
        for module in model.modules():
            if hasattr(module, "max_seq_length"):
                module.max_seq_length = draw("length", 32, 20, 61)
        return model

    def base_loss(self, draw: Draw) -> tuple:
        return self.losses[draw("base loss", *self.losses, often=0.4)]

    def loss(self, draw: Draw, model: nn.Module, stock: bool) -> nn.Module:
        from sentence_transformers.sparse_encoder import losses

        class_name, options, _, _ = self.base_loss(draw)
        wrap = draw("loss", "SpladeLoss", "CachedSpladeLoss")
        weights = {"document_regularizer_weight": 3e-2}
        if draw.words.get("model") != "inference_free":
            weights["query_regularizer_weight"] = 5e-2
        if draw("threshold", False, True, often=0.8):
            weights["document_regularizer_threshold"] = 150
        if wrap == "CachedSpladeLoss":
            weights["mini_batch_size"] = draw.any("mini_batch_size", 1, 2, 3, 3, 32)
        return getattr(losses, wrap)(model, getattr(losses, class_name)(model, **options), **weights)

    def columns(self, draw: Draw) -> int:
        _, _, counts, _ = self.base_loss(draw)
        return draw.any("columns", *counts) - 1

    def tokenizer(self, draw: Draw, model: nn.Module) -> Callable[..., list[dict]]:
        from tests.support.splade_steps import batch_of

        return lambda *texts: batch_of(model, len(texts), texts)

    def labels(self, draw: Draw, queries: int, columns: int) -> Tensor | None:
        _, _, _, form = self.base_loss(draw)
        labels = labels_of(queries, columns + 1)
        return {
            None: None,
            "pairs": labels[:, 0],
            "documents": labels[:, 1:],
            "negatives": labels[:, 1] if columns == 2 else labels[:, 2:],
        }[form]


class ColPali(Host):
    name = "colpali"
    losses = (
        *("ColbertLoss", "ColbertPairwiseCELoss", "ColbertSigmoidLoss"),
        *("ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss"),
    )

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
