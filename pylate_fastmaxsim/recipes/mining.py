"""From plain (query, positive) pairs to distillation data: hard negatives by exact search, scored by a teacher."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import PartialState
from datasets import Dataset
from pylate.models import ColBERT
from sentence_transformers import CrossEncoder
from tqdm import tqdm

from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.recipes.beir import BATCHES_AT_ONCE, encode
from pylate_fastmaxsim.recipes.model import load_model
from pylate_fastmaxsim.recipes.pairs import Pairs, load_pairs
from pylate_fastmaxsim.recipes.schema import MiningSection, ModelSection, Recipe, RecipeError
from pylate_fastmaxsim.recipes.tables import progress_shown
from pylate_fastmaxsim.recipes.train import training_arguments
from pylate_fastmaxsim.search import search
from pylate_fastmaxsim.tokens import TokenBatch

SUMMARY_FILE = "mining.json"
SETTINGS_FILE = "settings.json"

# What is kept of each stage, part by part.
PART_TYPES = {"search": ".npz", "positives": ".npy", "teacher": ".npy"}


def mine(recipe: Recipe, resume: bool = True) -> dict[str, Any]:
    """Write distillation data to ``data.name``, in the layout of ``lightonai/ms-marco-en-bge``.

    Each row holds the positive of a pair and its hardest negatives among all positives of the data and the documents of
    ``mining.corpus``, best first, with the teacher's scores. What is computed is kept in ``data.name`` +
    ``.unfinished`` until the data set is complete, so a run that was interrupted goes on from there.

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
        The recipe does not mine, its pairs or models cannot be loaded, or earlier results are of other settings.
    """
    section = recipe.mining
    if section is None or recipe.data.source != "distillation":
        raise RecipeError("fastmaxsim mine needs a recipe with a mining section and data.source distillation.")
    device = training_arguments(recipe).device
    processes = PartialState()
    output = Path(recipe.data.name)
    unfinished = output.with_name(output.name + ".unfinished")
    options = {name: value for name, value in asdict(section).items() if name != "corpus" or value is not None}
    settings = {"mining": options, "model": asdict(recipe.model), "seed": recipe.training.seed}
    with processes.main_process_first():
        # What is in the way the main process has removed when the others look.
        finished = _open(output, unfinished, settings, resume or not processes.is_main_process)
    if finished is not None:
        return finished
    with processes.main_process_first():
        pairs = load_pairs(section)
    model = load_model(recipe.model, device, recipe.training.seed)
    if processes.is_main_process:
        unfinished.mkdir(parents=True, exist_ok=True)
        _write(unfinished / SETTINGS_FILE, lambda file: Path(file).write_text(json.dumps(settings)))
    work = Work(unfinished, processes)
    scores, found = _search(model, pairs, section, work)
    chosen = _hard_negatives(pairs, section, scores, found, _lowest_positive_scores(model, pairs, section, work))
    del model
    candidates = [(query, [document, *chosen[query]]) for query, document in pairs.rows if query in chosen]
    if not candidates:
        raise RecipeError(
            "mining: no query has as many negatives as mining.num_negatives; lower it, raise mining.range_max, or loosen the margins."
        )
    graded = _grade(_teacher(section, device), pairs, candidates, section, work)
    summary = {
        "queries": len(pairs.queries),
        "documents": len(pairs.documents),
        "rows": len(candidates),
        "left_out": len(pairs.rows) - len(candidates),
        "data": str(output),
    }
    if processes.is_main_process:
        with progress_shown():
            _write_data(unfinished / "data", pairs, candidates, graded, summary | {"settings": settings})
        os.replace(unfinished / "data", output)
        shutil.rmtree(unfinished)
    processes.wait_for_everyone()
    return summary


def _open(output: Path, unfinished: Path, settings: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """The summary where mining is done already, else None with nothing in the way of these settings."""
    if output.exists() and not (output / SUMMARY_FILE).exists():
        raise RecipeError(f"data.name must be a folder for mining to write, but {output} holds something else.")
    for file in (output / SUMMARY_FILE, unfinished / SETTINGS_FILE):
        if not file.exists():
            continue
        if not resume:
            shutil.rmtree(file.parent)
            continue
        earlier = json.loads(file.read_text())
        # As JSON, where a tuple is a list.
        if earlier.get("settings", earlier) != json.loads(json.dumps(settings)):
            raise RecipeError(
                f"data.name: {file.parent} was mined with other settings; keep them, choose another folder, or start over with --no-resume."
            )
        if file.parent == output:
            return {key: value for key, value in earlier.items() if key != "settings"}
    return None


@dataclass(frozen=True)
class Work:
    """What is computed part by part, each part a file in ``folder``, shared among ``processes``."""

    folder: Path
    processes: PartialState

    def parts(
        self,
        stage: str,
        title: str,
        unit: str,
        total: int,
        step: int,
        compute: Callable[[slice, tqdm], np.ndarray | dict[str, np.ndarray]],
    ) -> list[Path]:
        """The files of a stage for ``total`` items, ``step`` in each, once all are there.

        ``compute`` makes what a file holds from its items, and says to the bar how many are done.
        """
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


def _save(arrays: np.ndarray | dict[str, np.ndarray], file: str) -> None:
    if isinstance(arrays, dict):
        np.savez(file, **arrays)
    else:
        np.save(file, arrays)


def _search(model: ColBERT, pairs: Pairs, section: MiningSection, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
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
    for file in work.parts("search", "Searching", " documents", len(pairs.documents), step, compute):
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
        allowed = [d for s, d in others[: section.range_max] if is_negative(section, s, lowest[query])]
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


def _lowest_positive_scores(model: ColBERT, pairs: Pairs, section: MiningSection, work: Work) -> list[float]:
    def compute(part: slice, bar: tqdm) -> np.ndarray:
        rows = pairs.rows[part]
        scores = _colbert_scores(model, pairs, [(query, [document]) for query, document in rows], section.batch_size)
        bar.update(len(rows))
        return scores[:, 0]

    lowest = [float("inf")] * len(pairs.queries)
    step = BATCHES_AT_ONCE * section.batch_size
    files = work.parts("positives", "Scoring positives", " pairs", len(pairs.rows), step, compute)
    for (query, _), score in zip(pairs.rows, np.concatenate(list(map(np.load, files))), strict=True):
        lowest[query] = min(lowest[query], score.item())
    return lowest


Candidates = list[tuple[int, list[int]]]
Teacher = Callable[[Pairs, Candidates], np.ndarray]


def _colbert_scores(model: ColBERT, pairs: Pairs, candidates: Candidates, batch_size: int) -> np.ndarray:
    """MaxSim of the candidates of each query, ``[N, K]``."""
    used = {document: place for place, document in enumerate(dict.fromkeys(d for _, row in candidates for d in row))}
    queries = encode(model, pairs.queries[[query for query, _ in candidates]]["text"], batch_size, is_query=True)
    documents = encode(model, pairs.documents[list(used)]["text"], batch_size, is_query=False)
    places = torch.tensor([[used[document] for document in row] for _, row in candidates], device=documents.device)
    with torch.no_grad():
        return maxsim(queries, documents, places).cpu().numpy()


def _teacher(section: MiningSection, device: torch.device) -> Teacher:
    if section.teacher_type == "colbert":
        model = load_model(ModelSection(name_or_path=section.teacher), device, seed=0)

        def by_colbert(pairs: Pairs, candidates: Candidates) -> np.ndarray:
            scores = _colbert_scores(model, pairs, candidates, section.batch_size)
            lowest, highest = scores.min(1, keepdims=True), scores.max(1, keepdims=True)
            return (scores - lowest) / (highest - lowest + 1e-8)  # as PyLate's Distillation scales the student's

        return by_colbert
    try:
        encoder = CrossEncoder(section.teacher, device=str(device))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise RecipeError(f"mining.teacher {section.teacher} cannot be loaded: {reason}") from error

    def by_cross_encoder(pairs: Pairs, candidates: Candidates) -> np.ndarray:
        queries = pairs.queries[[query for query, row in candidates for _ in row]]["text"]
        documents = pairs.documents[[document for _, row in candidates for document in row]]["text"]
        texts = list(zip(queries, documents, strict=True))
        scores = encoder.predict(texts, batch_size=section.batch_size, show_progress_bar=False)
        if np.ndim(scores) != 1:
            raise RecipeError(
                f"mining.teacher {section.teacher} must give one score a pair, but it gives {np.shape(scores)[1]}."
            )
        return scores.reshape(len(candidates), -1)

    return by_cross_encoder


def _grade(teacher: Teacher, pairs: Pairs, candidates: Candidates, section: MiningSection, work: Work) -> np.ndarray:
    """The teacher's scores of the documents of each row, ``[rows, 1 + num_negatives]``."""
    step = max(1, BATCHES_AT_ONCE * section.batch_size // (1 + section.num_negatives))

    def compute(part: slice, bar: tqdm) -> np.ndarray:
        scores = []
        for first in range(part.start, part.stop, step):
            rows = candidates[first : min(first + step, part.stop)]
            scores.append(teacher(pairs, rows).astype(np.float32))
            bar.update(len(rows))
        return np.concatenate(scores)

    files = work.parts("teacher", "Asking the teacher", " queries", len(candidates), section.rows_per_part, compute)
    return np.concatenate(list(map(np.load, files)))


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
