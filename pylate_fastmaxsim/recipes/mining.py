"""From plain (query, positive) pairs to distillation data: hard negatives by exact search, scored by a teacher."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import PartialState
from datasets import Dataset
from filelock import FileLock, Timeout
from pylate.models import ColBERT
from sentence_transformers import CrossEncoder
from tqdm import tqdm

from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.recipes.beir import BATCHES_AT_ONCE, encode
from pylate_fastmaxsim.recipes.memory import is_out_of_memory
from pylate_fastmaxsim.recipes.mined import SUMMARY_FILE
from pylate_fastmaxsim.recipes.model import NO_TOKENIZER, is_empty, lacks_tokenizer, load_model
from pylate_fastmaxsim.recipes.pairs import Pairs, load_pairs
from pylate_fastmaxsim.recipes.schema import MiningSection, ModelSection, Recipe, RecipeError
from pylate_fastmaxsim.recipes.tables import progress_shown
from pylate_fastmaxsim.recipes.train import training_arguments
from pylate_fastmaxsim.search import search
from pylate_fastmaxsim.tokens import TokenBatch

LOCK_FILE = "lock"

logger = logging.getLogger(__name__)

# What is kept of each stage, part by part.
PART_TYPES = {"search": ".npz", "positives": ".npy", "teacher": ".npy"}


def mine(recipe: Recipe, resume: bool = True) -> dict[str, Any]:
    """Write distillation data to ``data.name``, in the layout of ``lightonai/ms-marco-en-bge``.

    Each row holds the positive of a pair and its hardest negatives among all positives of the data and the documents of
    ``mining.corpus``, best first, with the teacher's scores. What is computed is kept in ``data.name`` +
    ``.unfinished`` until the data set is complete, so a run that was interrupted goes on from there. Settings may change
    in between: what they do not concern is kept, as the search is for other margins or another teacher.

    Under a distributed launcher every process calls this, and each computes a share of what is missing, in a folder
    that all must see; only the main process writes the data set. The result does not depend on the number of
    processes, which may change when a run goes on. When a process fails, the launcher ends the others. Who waits for
    another longer than the 30 minutes of ``torch.distributed`` fails, so that no part should take as long as that.

    Parameters
    ----------
    recipe
        With a ``mining`` section, and ``data.source: distillation``.
    resume
        Otherwise earlier results are removed and mining starts over.

    Returns
    -------
    Numbers of queries, documents, rows written and rows left out for lack of negatives; also in ``mining.json``.

    Raises
    ------
    RecipeError
        The recipe does not mine, its pairs or models cannot be loaded, the data set is complete and of other settings,
        another command mines it at this moment, or memory has run out.
    """
    section = recipe.mining
    if section is None or recipe.data.source != "distillation":
        raise RecipeError("fastmaxsim mine needs a recipe with a mining section and data.source distillation.")
    if recipe.model.name_or_path is None:
        raise RecipeError("model.build does not apply to fastmaxsim mine, which searches with model.name_or_path.")
    device = training_arguments(recipe).device
    processes = PartialState()
    output = Path(recipe.data.name)
    unfinished = output.with_name(output.name + ".unfinished")
    with _only_launch(output, unfinished) if processes.is_main_process else nullcontext():
        try:
            return _mine(recipe, resume, device, processes, output, unfinished)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise RecipeError(
                f"mining.batch_size of {section.batch_size} is more than fits into memory; what is done is kept, and "
                "the same command with a smaller one goes on from there."
            ) from error


def _mine(
    recipe: Recipe, resume: bool, device: torch.device, processes: PartialState, output: Path, unfinished: Path
) -> dict[str, Any]:
    section = recipe.mining
    options = {name: value for name, value in asdict(section).items() if name != "corpus" or value is not None}
    settings = {"mining": options, "model": asdict(recipe.model), "seed": recipe.training.seed}
    finished = _finished(output, settings, resume)
    if finished is not None:
        return finished
    # All that a recipe can have wrong is found before hours of search, and before anything is removed.
    with processes.main_process_first():
        pairs = load_pairs(section)
    model = load_model(recipe.model, device, recipe.training.seed)
    teacher = _teacher(section, device)
    if processes.is_main_process and not resume:
        shutil.rmtree(output, ignore_errors=True)
        for path in unfinished.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK_FILE:
                path.unlink()
    work = Work(unfinished, processes)
    common = {
        "mining.pairs or mining.corpus": pairs.digest,
        "model": settings["model"] | {"files": _files_digest(recipe.model.name_or_path)},
        "training.seed": settings["seed"],
    }
    scores, found = _search(model, pairs, section, work, common)
    lowest = _lowest_positive_scores(model, pairs, section, work, common)
    chosen = _hard_negatives(pairs, section, scores, found, lowest)
    del model
    candidates = [(query, [document, *chosen[query]]) for query, document in pairs.rows if query in chosen]
    if not candidates:
        raise RecipeError(
            "mining: no query has as many negatives as mining.num_negatives; lower it or loosen the margins, for which "
            "the search is kept, or raise mining.range_max, for which it begins anew."
        )
    graded = _grade(teacher, pairs, candidates, section, work)
    summary = {
        "queries": len(pairs.queries),
        "documents": len(pairs.documents),
        "rows": len(candidates),
        "left_out": len(pairs.rows) - len(candidates),
        "data": str(output),
    }
    if processes.is_main_process:
        digest = hashlib.sha256(_digest(pairs, candidates).encode() + graded.tobytes()).hexdigest()
        with progress_shown():
            record = summary | {"digest": digest, "settings": settings}
            _write_data(unfinished / "data", pairs, candidates, graded, record)
        os.replace(unfinished / "data", output)
        shutil.rmtree(unfinished)
    processes.wait_for_everyone()
    return summary


@contextmanager
def _only_launch(output: Path, unfinished: Path) -> Iterator[None]:
    """Refuse to mine what another command is mining at this moment."""
    unfinished.mkdir(parents=True, exist_ok=True)
    lock = FileLock(unfinished / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RecipeError(
            f"data.name: {output} is being mined by another command; wait until it ends, or choose another folder."
        ) from None
    try:
        yield
    finally:
        # While it is held, so that whoever holds it holds the file that others find; nothing is left of nothing.
        Path(lock.lock_file).unlink(missing_ok=True)
        with suppress(OSError):
            unfinished.rmdir()
        lock.release()


def _finished(output: Path, settings: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """The summary where mining is done already, else None."""
    if not output.exists():
        return None
    if not (output / SUMMARY_FILE).exists():
        raise RecipeError(f"data.name must be a folder for mining to write, but {output} holds something else.")
    if not resume:
        return None
    earlier = json.loads((output / SUMMARY_FILE).read_text(encoding="utf-8"))
    # As JSON, where a tuple is a list.
    if _deciding(earlier["settings"]) != _deciding(json.loads(json.dumps(settings))):
        raise RecipeError(
            f"data.name: {output} was mined with other settings; keep them, choose another folder, or start over with --no-resume."
        )
    return {key: value for key, value in earlier.items() if key not in ("digest", "settings")}


def _deciding(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that say only how the work is cut into pieces."""
    pieces = ("batch_size", "documents_per_part", "rows_per_part")
    return settings | {"mining": {key: value for key, value in settings["mining"].items() if key not in pieces}}


@dataclass(frozen=True)
class Work:
    """What is computed part by part, each part a file in ``folder``, shared among ``processes``."""

    folder: Path
    processes: PartialState

    def parts(
        self,
        stage: str,
        settings: dict[str, Any],
        title: str,
        unit: str,
        total: int,
        step: int,
        compute: Callable[[slice, tqdm], np.ndarray | dict[str, np.ndarray]],
    ) -> list[Path]:
        """The files of a stage for ``total`` items, ``step`` in each, once all are there.

        ``settings`` are what they depend on; files of others are removed. ``compute`` makes what a file holds from its
        items, and says to the bar how many are done.
        """
        if self.processes.is_main_process:
            # As JSON, where a tuple is a list.
            self._keep_only(stage, json.loads(json.dumps(settings)))
        self.processes.wait_for_everyone()
        parts = [slice(begin, min(begin + step, total)) for begin in range(0, total, step)]
        files = [self.folder / f"{stage}-{part.start:010d}{PART_TYPES[stage]}" for part in parts]
        missing = [number for number, file in enumerate(files) if not file.exists()]
        # All processes must find the same parts missing, so none may write before the others have looked.
        self.processes.wait_for_everyone()
        count, main = self.processes.num_processes, self.processes.is_main_process
        own = missing[self.processes.process_index :: count]
        others = sum(parts[number].stop - parts[number].start for number in set(missing).difference(own))
        left = sum(parts[number].stop - parts[number].start for number in own)
        bar = tqdm(
            total=total - others,
            initial=total - others - left,
            desc=f"{title} (process 1 of {count})" if count > 1 else title,
            unit=unit,
            unit_scale=True,
            disable=not main,
        )
        with bar:
            for number in own:
                result = compute(parts[number], bar)
                _write(files[number], functools.partial(_save, result))
        self.processes.wait_for_everyone()
        return files

    def _keep_only(self, stage: str, settings: dict[str, Any]) -> None:
        """Remove the files of a stage that are of other settings."""
        record = self.folder / f"settings-{stage}.json"
        earlier = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        if earlier == settings:
            return
        stale = list(self.folder.glob(f"{stage}-*{PART_TYPES[stage]}"))
        for file in stale:
            file.unlink()
        if stale:
            changed = [name for name in settings if earlier.get(name) != settings[name]]
            logger.warning(
                "mining: %d finished parts of the stage %s are removed and computed anew, since these have changed: %s.",
                len(stale),
                stage,
                ", ".join(changed),
            )
        _write(record, lambda file: Path(file).write_text(json.dumps(settings), encoding="utf-8"))


def _save(arrays: np.ndarray | dict[str, np.ndarray], file: str) -> None:
    if isinstance(arrays, dict):
        np.savez(file, **arrays)
    else:
        np.save(file, arrays)


def _search(
    model: ColBERT, pairs: Pairs, section: MiningSection, work: Work, common: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and numbers of the best documents of each query, ``[Nq, K]``, found part by part of the documents."""
    # So many that all positives of a query can be taken out and range_max are left.
    k = section.range_max + max(map(len, pairs.positives()))

    @functools.cache
    def queries() -> TokenBatch:
        main = work.processes.is_main_process
        return encode(model, pairs.queries[:]["text"], section.batch_size, is_query=True, show_progress=main)

    def compute(part: slice, bar: tqdm) -> dict[str, np.ndarray]:
        documents = pairs.documents.select(range(part.start, part.stop))
        scores, found = search(queries(), _encoded(model, documents, section.batch_size, bar), k)
        return {"scores": scores.cpu().numpy(), "found": found.cpu().numpy() + part.start}

    best = None
    step = section.documents_per_part
    settings = common | {"mining.range_max": section.range_max, "mining.documents_per_part": step}
    for file in work.parts("search", settings, "Searching", " documents", len(pairs.documents), step, compute):
        with np.load(file) as arrays:
            scores, found = (torch.from_numpy(arrays[name]) for name in ("scores", "found"))
        if best is not None:
            scores, found = (torch.cat(columns, dim=1) for columns in zip(best, (scores, found), strict=True))
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        best = scores[:, :k], found.gather(1, order[:, :k])
    return best


def _encoded(model: ColBERT, documents: Dataset, batch_size: int, bar: tqdm) -> Iterator[TokenBatch]:
    for rows in documents.iter(BATCHES_AT_ONCE * batch_size):
        yield encode(model, rows["text"], batch_size, is_query=False)
        bar.update(len(rows["text"]))


def _hard_negatives(
    pairs: Pairs, section: MiningSection, scores: torch.Tensor, found: torch.Tensor, lowest: list[float]
) -> dict[int, list[int]]:
    """The negatives of each query that has enough of them, hardest first; ``lowest`` is each one's worst positive."""
    positives = pairs.positives()
    chosen = {}
    for query, (ranked, documents) in enumerate(zip(scores.tolist(), found.tolist(), strict=True)):
        others = [(s, d) for s, d in zip(ranked, documents, strict=True) if d not in positives[query]]
        allowed = [d for s, d in others if is_negative(section, s, lowest[query])][: section.range_max]
        negatives = allowed[section.range_min : section.range_min + section.num_negatives]
        if len(negatives) == section.num_negatives:
            chosen[query] = negatives
    return chosen


def is_negative(section: MiningSection, score: float, positive: float) -> bool:
    """Whether a document may be a negative by its score and that of the query's lowest positive.

    The rules are those of ``sentence_transformers.util.mine_hard_negatives``.
    """
    return not (
        (section.absolute_margin is not None and score + section.absolute_margin > positive)
        or (section.relative_margin is not None and score > positive * (1 - section.relative_margin))
        or (section.max_score is not None and score > section.max_score)
        or (section.min_score is not None and score < section.min_score)
    )


def _lowest_positive_scores(
    model: ColBERT, pairs: Pairs, section: MiningSection, work: Work, common: dict[str, Any]
) -> list[float]:
    def score(pairs: Pairs, candidates: Candidates) -> np.ndarray:
        return _colbert_scores(model, pairs, candidates, section.batch_size)

    candidates = [(query, [document]) for query, document in pairs.rows]
    compute = functools.partial(_scored, score, pairs, candidates, BATCHES_AT_ONCE * section.batch_size)
    lowest = [float("inf")] * len(pairs.queries)
    step = section.rows_per_part
    settings = common | {"mining.rows_per_part": step}
    files = work.parts("positives", settings, "Scoring positives", " pairs", len(candidates), step, compute)
    for (query, _), score in zip(pairs.rows, np.concatenate(list(map(np.load, files)))[:, 0], strict=True):
        lowest[query] = min(lowest[query], score.item())
    return lowest


def _scored(score: Scorer, pairs: Pairs, candidates: Candidates, at_once: int, part: slice, bar: tqdm) -> np.ndarray:
    """The scores of a part of the candidates, ``at_once`` rows of which are scored together."""
    scores = []
    for first in range(part.start, part.stop, at_once):
        rows = candidates[first : min(first + at_once, part.stop)]
        scores.append(score(pairs, rows).astype(np.float32))
        bar.update(len(rows))
    return np.concatenate(scores)


Candidates = list[tuple[int, list[int]]]
Scorer = Callable[[Pairs, Candidates], np.ndarray]


def _colbert_scores(model: ColBERT, pairs: Pairs, candidates: Candidates, batch_size: int) -> np.ndarray:
    """MaxSim of the candidates of each query, ``[N, K]``."""
    used = {document: place for place, document in enumerate(dict.fromkeys(d for _, row in candidates for d in row))}
    queries = encode(model, pairs.queries[[query for query, _ in candidates]]["text"], batch_size, is_query=True)
    documents = encode(model, pairs.documents[list(used)]["text"], batch_size, is_query=False)
    places = torch.tensor([[used[document] for document in row] for _, row in candidates], device=documents.device)
    with torch.no_grad():
        return maxsim(queries, documents, places).cpu().numpy()


def _teacher(section: MiningSection, device: torch.device) -> Scorer:
    """Loaded, in main memory until it is asked: until then the device is for the search."""
    name = section.teacher
    if section.teacher_type == "colbert":
        model = load_model(ModelSection(name_or_path=name), "cpu", seed=0, key="mining.teacher")

        def by_colbert(pairs: Pairs, candidates: Candidates) -> np.ndarray:
            scores = _colbert_scores(model.to(device), pairs, candidates, section.batch_size)
            lowest, highest = scores.min(1, keepdims=True), scores.max(1, keepdims=True)
            return (scores - lowest) / (highest - lowest + 1e-8)  # as PyLate's Distillation scales the student's

        return by_colbert
    try:
        encoder = CrossEncoder(name, device="cpu")
    except (OSError, ValueError, ImportError) as error:
        if lacks_tokenizer(ModelSection(name_or_path=name)):
            raise RecipeError(NO_TOKENIZER.format("mining.teacher", name)) from error
        reason = str(error).strip().split("\n")[0]
        raise RecipeError(f"mining.teacher {name} cannot be loaded: {reason}") from error
    if is_empty(encoder.tokenizer):
        raise RecipeError(NO_TOKENIZER.format("mining.teacher", name))
    if encoder.config.num_labels != 1:
        raise RecipeError(
            f"mining.teacher {name} must give one score a pair, but it gives {encoder.config.num_labels}."
        )

    def by_cross_encoder(pairs: Pairs, candidates: Candidates) -> np.ndarray:
        queries = pairs.queries[[query for query, row in candidates for _ in row]]["text"]
        documents = pairs.documents[[document for _, row in candidates for document in row]]["text"]
        texts = list(zip(queries, documents, strict=True))
        scores = encoder.to(device).predict(texts, batch_size=section.batch_size, show_progress_bar=False)
        return scores.reshape(len(candidates), -1)

    return by_cross_encoder


def _grade(teacher: Scorer, pairs: Pairs, candidates: Candidates, section: MiningSection, work: Work) -> np.ndarray:
    """The teacher's scores of the documents of each row, ``[rows, 1 + num_negatives]``."""
    at_once = max(1, BATCHES_AT_ONCE * section.batch_size // (1 + section.num_negatives))
    compute = functools.partial(_scored, teacher, pairs, candidates, at_once)
    settings = {
        "mining.teacher": [section.teacher, _files_digest(section.teacher)],
        "mining.teacher_type": section.teacher_type,
        "mining.rows_per_part": section.rows_per_part,
        "the negatives": _digest(pairs, candidates),
    }
    step = section.rows_per_part
    files = work.parts("teacher", settings, "Asking the teacher", " queries", len(candidates), step, compute)
    return np.concatenate(list(map(np.load, files)))


def _files_digest(model: str) -> str | None:
    """Of a model in a folder, which may have been trained again since; None of one on the Hub."""
    if not Path(model).is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(model).rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            while block := file.read(2**24):
                digest.update(block)
    return digest.hexdigest()


def _digest(pairs: Pairs, candidates: Candidates) -> str:
    """The same for the same texts in the same rows."""
    rows = np.array([[query, *documents] for query, documents in candidates])
    return hashlib.sha256(pairs.digest.encode() + rows.tobytes()).hexdigest()


def _write(file: Path, write: Callable[[str], Any]) -> None:
    """A file that appears under its name only when it is complete."""
    scratch = file.with_name(f"writing-{file.name}")
    write(str(scratch))
    os.replace(scratch, file)


def _write_data(
    folder: Path, pairs: Pairs, candidates: Candidates, scores: np.ndarray, summary: dict[str, Any]
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    train = {
        "query_id": [str(query) for query, _ in candidates],
        "document_ids": [list(map(str, row)) for _, row in candidates],
        "scores": scores.tolist(),
    }
    tables = {
        "train": Dataset.from_dict(train),
        "queries": _numbered(pairs.queries, "query_id", folder),
        "documents": _numbered(pairs.documents, "document_id", folder),
    }
    for name, table in tables.items():
        table.to_parquet(folder / f"{name}.parquet")
    configs = [{"config_name": name, "data_files": [{"split": "train", "path": f"{name}.parquet"}]} for name in tables]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf-8")
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _numbered(texts: Dataset, column: str, folder: Path) -> Dataset:
    """``texts`` with their numbers as ids, on disk as well."""
    numbered = texts.map(
        lambda batch, rows: {column: list(map(str, rows))},
        batched=True,
        with_indices=True,
        cache_file_name=str(folder.parent / f"{column}.arrow"),
        load_from_cache_file=False,
        desc="Writing texts",
    )
    return numbered.select_columns([column, "text"])
