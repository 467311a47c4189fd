"""Search a collection with a model, exactly: rankings, metrics, and what took how long."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import torch
from datasets import Dataset
from torch import Tensor

from pylate_fastmaxsim import enabled
from pylate_fastmaxsim.pooling import Max, Pooling
from pylate_fastmaxsim.recipes.compression import SAMPLE_DOCUMENTS
from pylate_fastmaxsim.recipes.config.schema import CompressedFormat, FirstStageSection
from pylate_fastmaxsim.recipes.data.collection import Collection, corpus_digest, document_texts
from pylate_fastmaxsim.recipes.errors import RecipeError, as_recipe_error, within_memory
from pylate_fastmaxsim.recipes.evaluation.first_stage import (
    best_candidates,
    first_stage_named,
    load_first_stage,
    search_device,
)
from pylate_fastmaxsim.recipes.evaluation.ranking import (
    Ranking,
    encode_corpus,
    encode_sample,
    metrics_of,
    ranking,
    require_ids_of_one_word,
    write_run,
)
from pylate_fastmaxsim.recipes.files import prepare_file
from pylate_fastmaxsim.recipes.models.load import load_retriever
from pylate_fastmaxsim.recipes.models.retriever import (
    BATCHES_AT_ONCE,
    Encoded,
    NotFiniteError,
    Retriever,
    StaticRetriever,
    retriever_of,
)
from pylate_fastmaxsim.recipes.search.index import Description, open_or_build
from pylate_fastmaxsim.recipes.search.plaid import open_plaid, overlap
from pylate_fastmaxsim.retrieval.corpus import Corpus
from pylate_fastmaxsim.retrieval.search import rounded, selected
from pylate_fastmaxsim.retrieval.sparse.index import SparseIndex

# The tasks, in the order of the report. INDEX is to write the index, and to open it.
ENCODE_QUERIES, ENCODE_DOCUMENTS, INDEX, SEARCH = "encode queries", "encode documents", "index", "search"
# For the codec of an index; the own search of one of PLAID.
ENCODE_SAMPLE, PRUNED = "encode a sample", "PLAID's search"
FIRST_STAGE = "first stage"
# By how many ranks they look at.
METRICS_BY_DEPTH = {"ndcg@10": 10, "mrr@10": 10, "recall@100": 100, "recall@1000": 1000}
# Of token embeddings in an index. The first is the default.
FORMATS = ("float32", "bfloat16", "float16", *get_args(CompressedFormat))


# Begins a task of so many items, of which some may be done, and returns what is told how many more are.
Progress = Callable[..., Callable[[int], object]]


@dataclass(frozen=True)
class Options:
    """The options of ``search`` and ``evaluate``, by their names."""

    k: int = 1000
    run: Path | None = None
    index: Path | None = None
    format: str | None = None  # one of FORMATS; None is the first
    batch_size: int | None = 32  # None of evaluate: that of a recipe, or 32
    trust_remote_code: bool = False
    exact: bool = True
    dense: bool = False
    pool_factor: float = 1  # tokens of a document a vector
    plaid: Path | None = None
    first_stage: str | None = None  # as first_stage_named takes it
    candidates: int | None = None  # of each query, by the first stage; None: 1000
    pooling: Pooling = Max()  # of late interaction
    inputs: Sequence[Path | None] = ()  # what is read, and so not written to


def search(name: str, collection: Collection, options: Options, progress: Progress) -> dict[str, Any]:
    """Search all queries of a collection with a model, by its folder or its name on the Hub.

    The result has names and numbers, ``seconds`` of encoding and of search, and ``metrics``, which are None without
    judgements. A metric that looks at more ranks than ``k`` is left out.
    """
    if options.run is not None:
        require_ids_of_one_word(collection)
        prepare_file("--run", options.run, options.inputs)
    model = load_retriever(name, best_device(), options.trust_remote_code, dense=options.dense)
    model = retriever_of(model, finite=True, exact=options.exact, pool_factor=options.pool_factor)
    _check_options(options, model)
    task = Search(name, model, collection, options, progress)
    found = task.ranking()
    names = [name for name, depth in METRICS_BY_DEPTH.items() if depth <= options.k]

    def metrics(found: Ranking) -> dict[str, float] | None:
        return metrics_of(found, collection, names) if collection.judgements and names else None

    return task.summary() | {
        "metrics": metrics(found),
        "plaid": None if task.plaid is None else task.compare_with_pruning(metrics),
    }


def best_device() -> torch.device:
    """The GPU, where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _check_options(options: Options, retriever: Retriever) -> None:
    if not options.exact and not isinstance(retriever, StaticRetriever):
        raise RecipeError("--no-exact is for a static model; every other is searched exactly.")
    if options.index is not None and not retriever.has_vectors:
        raise RecipeError(
            "--index keeps vectors, of which a static model needs none for MaxSim; leave it out, or add --no-exact."
        )
    if options.plaid is not None and (
        options.index is not None or options.pool_factor > 1 or retriever.kind != Retriever.kind
    ):
        raise RecipeError("--plaid is an index of its own; it needs a ColBERT and no --index or --pool-factor.")
    check_first_stage(options)
    if options.first_stage is not None and (options.plaid is not None or retriever.kind != Retriever.kind):
        raise RecipeError("--first-stage is for late interaction, and for no index of PLAID.")
    if options.format is not None:
        check_format(options.format, options.index if retriever.has_token_embeddings else None)


def check_first_stage(options: Options) -> FirstStageSection | None:
    """The first stage that is asked for. RecipeError if it is none, or candidates are without one."""
    if options.first_stage is not None:
        return first_stage_named(options.first_stage, options.candidates or 1000)
    if options.candidates is not None:
        raise RecipeError("--candidates are those of a first stage; name it with --first-stage.")
    return None


def check_format(name: str, index: Path | None) -> None:
    """Refuse a format of token embeddings that is not one, or where no index holds them."""
    if name not in FORMATS:
        raise RecipeError(f"--format must be one of {', '.join(FORMATS)}, got {name}.")
    if index is None:
        raise RecipeError("--format is that of token embeddings in an index; it needs --index and a ColBERT.")


class Clock:
    """Add up the seconds of each task in ``seconds``, each second once: a task within another one stops the clock of the outer.

    The work that tasks queued on a GPU is waited for, so that it counts as theirs.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = {}
        self._task: str | None = None
        self._since = 0.0

    @contextmanager
    def during(self, task: str) -> Iterator[None]:
        """Context whose seconds are those of a task."""
        outer = self._task
        self._switch(task)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, task: str | None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._task is not None:
            self.seconds[self._task] = self.seconds.get(self._task, 0.0) + now - self._since
        self._task, self._since = task, now


class Search:
    """A search of all queries of a collection with a model that is loaded.

    With an index of PLAID only the documents that it holds are searched. ``clock`` has the seconds of each task, ``encoded``
    the number of documents that were encoded, and ``vectors`` that of the token vectors that were searched.
    """

    def __init__(
        self, name: str, model: Retriever, collection: Collection, options: Options, progress: Progress
    ) -> None:
        self.name, self.model, self.options, self.progress = name, model, options, progress
        self.clock, self.encoded, self.vectors = Clock(best_device()), 0, 0
        self.plaid = None if options.plaid is None else open_plaid(options.plaid)
        self.collection = collection if self.plaid is None else self.plaid.reorder(collection)
        self.queries: Encoded | None = None
        self.positions: Tensor | None = None

    def ranking(self) -> Ranking:
        """The ``k`` best documents of each query, which are written to ``options.run`` as well."""
        # A static model encodes without a library.
        plugin = nullcontext() if self.model.kind == StaticRetriever.kind else enabled()
        kept = ", and the same command goes on from what is in the index" if self.options.index is not None else ""
        try:
            with plugin, within_memory("--batch-size", self.options.batch_size, f"lower it{kept}"):
                search = self._search if self.options.first_stage is None else self._search_candidates
                scores, self.positions = search()
        except NotFiniteError:
            raise RecipeError(
                f"MODEL {self.name}: some embeddings are NaN or infinite, as after a training that diverged."
            ) from None
        found = ranking(self.collection, scores, self.positions, self.options.k)
        if self.options.run is not None:
            write_run(self.options.run, found)
        return found

    def summary(self) -> dict[str, Any]:
        """Names and numbers of a search that is done, and ``seconds`` of each task."""
        options = self.options
        return {
            "model": self.name,
            "kind": self.model.kind,
            "device": str(self.clock.device),
            "queries": len(self.collection.queries),
            "documents": len(self.collection.corpus),
            "encoded_documents": self.encoded,
            "k": options.k,
            "pool_factor": options.pool_factor,
            "vectors": self.vectors or None,
            "index": None if options.index is None else str(options.index),
            "run": None if options.run is None else str(options.run),
            "first_stage": options.first_stage,
            "seconds": self.clock.seconds,
        }

    def _search(self) -> tuple[Tensor, Tensor]:
        """Scores and positions, one more for each query than is asked for: it may be a document itself."""
        queries, depth = self._queries(), self._depth()
        if self.options.index is None and self.plaid is None:
            with self.clock.during(SEARCH):
                return self.model.search(queries, self._encode_from(0), depth, self.options.pooling)
        with self.clock.during(INDEX):
            documents = self._open_index() if self.plaid is None else self.plaid.documents_for(queries)
        self.vectors = getattr(documents, "tokens", None)  # also of those that were there
        searched = self.progress(SEARCH, len(documents))
        # A damaged file may be read late.
        with as_recipe_error("--index" if self.plaid is None else "--plaid"), self.clock.during(SEARCH):
            return self.model.search(queries, documents, depth, self.options.pooling, searched)

    def _search_candidates(self) -> tuple[Tensor, Tensor]:
        """Likewise, of the candidates of the first stage. Without an index only these are encoded."""
        options, device, corpus = self.options, self.clock.device, self.collection.corpus
        queries, texts = self._queries(), list(self.collection.queries.values())
        section = check_first_stage(options)
        stage = load_first_stage("--first-stage", section, self.model.model.tokenizer, options.batch_size, device)
        done = self.progress(FIRST_STAGE, len(corpus))
        with self.clock.during(FIRST_STAGE):
            batches = []
            for rows in corpus.iter(BATCHES_AT_ONCE * options.batch_size):
                batches.append(stage.documents(document_texts(rows)).to("cpu"))
                done(len(batches[-1]))
            index = SparseIndex.build(stage.weighted(lambda: iter(batches)), device=search_device(device))
            _, candidates = index.search(stage.queries(texts).to(index.device), section.k)
        if options.index is None:
            documents = self._encode_chosen
        else:
            with self.clock.during(INDEX):
                held = self._open_index()
            queries, documents = rounded(queries, held), partial(selected, held, device=queries.device)
        with as_recipe_error("--index"), self.clock.during(SEARCH):
            return best_candidates(queries, candidates, documents, self._depth(), options.pooling)

    def compare_with_pruning(self, metrics: Callable[[Ranking], dict[str, float] | None]) -> dict[str, Any]:
        """The share of the exhaustive ranking that PLAID's own search finds, and its metrics; or the reason against it."""
        folder = {"folder": str(self.plaid.folder)}
        try:
            with self.clock.during(INDEX):
                searching = partial(self.clock.during, PRUNED)
                scores, own = self.plaid.pruned_search(self.queries, self.positions.shape[1], searching)
        except RecipeError as error:
            return {**folder, "not_searched": str(error)}
        found = ranking(self.collection, scores, own, self.options.k)
        return {**folder, **overlap(self.positions, own), "metrics": metrics(found)}

    def _open_index(self) -> SparseIndex | Corpus:
        return open_or_build(self.options.index, self.description, self._encode_from, self._sample, self.clock.device)

    def _depth(self) -> int:
        return min(self.options.k, len(self.collection.corpus)) + 1

    def _queries(self) -> Encoded:
        if self.queries is not None:
            return self.queries
        texts = list(self.collection.queries.values())
        encoded = self.progress(ENCODE_QUERIES, len(texts))
        with self.clock.during(ENCODE_QUERIES):
            queries = self.model.encode(texts, self.options.batch_size, is_query=True)
        encoded(len(queries))
        self.queries = queries
        return queries

    def _encode_from(self, begin: int) -> Iterator[Encoded]:
        corpus = self.collection.corpus
        if begin == len(corpus):
            return
        for batch in self._encode(corpus.select(range(begin, len(corpus))), begin):
            yield batch
            if self.model.has_token_embeddings:
                self.vectors += int(batch.lengths.sum())

    def _encode_chosen(self, positions: Tensor) -> Iterator[Encoded]:
        return self._encode(self.collection.corpus.select(positions))

    def _encode(self, documents: Dataset, done: int = 0) -> Iterator[Encoded]:
        batches = encode_corpus(self.model, documents, self.options.batch_size)
        for batch in self._with_progress(ENCODE_DOCUMENTS, batches, done + len(documents), done):
            yield batch
            self.encoded += len(batch)

    def _sample(self) -> Iterator[Encoded]:
        corpus = self.collection.corpus
        batches = encode_sample(self.model, corpus, self.options.batch_size)
        return self._with_progress(ENCODE_SAMPLE, batches, min(len(corpus), SAMPLE_DOCUMENTS))

    def _with_progress(self, task: str, batches: Iterator[Encoded], total: int, done: int = 0) -> Iterator[Encoded]:
        """Time batches and tell the progress; each is done when it has been written or searched."""
        encoded = self.progress(task, total, done)
        while True:
            with self.clock.during(task):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            encoded(len(batch))

    @cached_property
    def description(self) -> Description:
        """The origin of an index of this search."""
        return Description(
            kind=self.model.kind,
            model=self.name,
            model_digest=self.model.digest(),
            corpus_digest=corpus_digest(self.collection.corpus),
            stored=self.options.format or FORMATS[0] if self.model.has_token_embeddings else None,
            documents=len(self.collection.corpus),
        )
