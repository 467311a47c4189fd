"""Mining: the negatives of brute force, the rules of sentence-transformers, and nothing lost by an interruption."""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from paths import RECIPES

pytest.importorskip("datasets")
pytest.importorskip("pylate")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from accelerate import PartialState
from datasets import Dataset
from pylate.scores import colbert_scores
from sentence_transformers import CrossEncoder
from tiny_recipe import few_steps, hub_dataset, text
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from typer.testing import CliRunner

from pylate_fastmaxsim.cli.commands import app
from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from pylate_fastmaxsim.recipes.mining import negatives, resumable
from pylate_fastmaxsim.recipes.mining.pairs import Pairs, load_pairs
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.training.train import train

RECIPE = RECIPES / "colbert_kd_mine.yaml"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, encoder) -> str:
    """A cross-encoder with random weights."""
    folder = str(tmp_path_factory.mktemp("teacher"))
    tokenizer = AutoTokenizer.from_pretrained(encoder("bert"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answers() -> list[str]:
    return [f"{text(i, 2 + i % 20)} {i}" for i in range(40)]


def recipe_for(tmp_path: Path, model: str, teacher: str, *overrides: str):
    data = tmp_path / "pairs"
    if not data.exists():
        # Every fourth query has two positives, and one pair stands there twice.
        rows = [{"query": text(i - i % 4 // 3, 5), "answer": each} for i, each in enumerate(answers())]
        hub_dataset(data, pair=[*rows, rows[0]])
    options = [
        f"model.name_or_path={model}",
        f"mining.pairs.name={data}",
        f"mining.teacher={teacher}",
        "mining.num_negatives=3",
        "mining.range_min=1",
        "mining.range_max=12",
        "mining.relative_margin=null",
        "mining.batch_size=4",
        "mining.documents_per_part=15",
        "mining.rows_per_part=9",
        f"data.name={tmp_path / 'mined'}",
        "evaluation.rows=8",
        *overrides,
    ]
    return load_recipe(RECIPE, few_steps(tmp_path / "out", *options))


def mine_but_stop(recipe, stage: str, after: int, monkeypatch) -> list[str]:
    """Mine until so many parts of a stage are written; their names."""
    write, seen = resumable.write_whole, []

    def interrupting(file, writer):
        if file.name.startswith(stage):
            if len(seen) == after:
                raise KeyboardInterrupt
            seen.append(file.name)
        write(file, writer)

    with monkeypatch.context() as patch:
        patch.setattr(resumable, "write_whole", interrupting)
        with pytest.raises(KeyboardInterrupt):
            mining_mine.mine(recipe)
    return seen


@pytest.mark.parametrize("rules", [{}, {"absolute_margin": -0.5, "relative_margin": -0.3, "min_score": 6.0}])
@pytest.mark.parametrize("with_corpus", [False, True])
def test_negatives_are_those_of_brute_force(rules, with_corpus, encoder, teacher, tmp_path):
    overrides = [f"mining.{name}={value}" for name, value in rules.items()]
    if with_corpus:
        # Texts of its own, one of them twice, among texts that are positives as well.
        own = [f"{text(i, 1 + i % 20)} extra {i}" for i in [*range(30), 3]]
        rows = [{"passage": passage} for passage in [*own[:20], *answers(), *own[20:]]]
        overrides.append(f"mining.corpus={{source: hub, name: {hub_dataset(tmp_path / 'corpus', passages=rows)}}}")
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, *overrides)
    summary = mining_mine.mine(recipe)
    folder = str(tmp_path / "mined")
    train_rows, queries, documents = (
        Dataset.from_parquet(f"{folder}/{name}.parquet") for name in ("train", "queries", "documents")
    )
    pairs = load_pairs(recipe.mining)
    queries, documents = queries["text"][:], documents["text"][:]
    assert (queries, documents) == (pairs.queries["text"][:], pairs.documents["text"][:])
    assert len(set(queries)) == len(queries) and len(set(documents)) == len(documents)
    assert documents == [*dict.fromkeys(answers()), *(own[:30] if with_corpus else [])]
    assert pairs.documents.cache_files  # and not in memory
    assert summary["rows"] + summary["left_out"] == len(pairs.rows) == 40 and summary["rows"] == len(train_rows) > 0

    model = load_model(recipe.model, "cpu", recipe.training.seed)
    q, d = (
        model.encode(texts, is_query=is_query, convert_to_tensor=True)
        for texts, is_query in ((queries, True), (documents, False))
    )
    scores = np.array([[colbert_scores(one[None], other[None]).item() for other in d] for one in q])
    expected = {}
    for query, positives in enumerate(pairs.positives()):
        lowest = min(scores[query][document] for document in positives)
        ranked = [int(x) for x in np.argsort(-scores[query], kind="stable") if x not in positives][:12]
        left = [
            x
            for x in ranked
            if not rules
            or (scores[query][x] - 0.5 <= lowest and scores[query][x] <= lowest * 1.3 and scores[query][x] >= 6.0)
        ]
        if len(left[1:4]) == 3:
            expected[query] = left[1:4]
    assert {int(row["query_id"]) for row in train_rows} == set(expected)
    grader = CrossEncoder(teacher, device="cpu")
    for row in train_rows:
        positive, *negatives = map(int, row["document_ids"])
        assert (int(row["query_id"]), positive) in pairs.rows
        assert negatives == expected[int(row["query_id"])]
        texts = [(queries[int(row["query_id"])], documents[int(x)]) for x in row["document_ids"]]
        assert row["scores"] == pytest.approx(grader.predict(texts).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("rule", "score", "allowed"),
    [
        ({"absolute_margin": 0.2}, 0.8, True),
        ({"absolute_margin": 0.2}, 0.81, False),
        ({"relative_margin": 0.05}, 0.95, True),
        ({"relative_margin": 0.05}, 0.96, False),
        ({"max_score": 0.7}, 0.71, False),
        ({"min_score": 0.7}, 0.69, False),
        ({}, 2.0, True),
    ],
)
def test_rules(rule, score, allowed):
    section = MiningSection(pairs=DataSection(source="hub", name="a"), teacher="b", **rule)
    assert negatives.is_negative(section, score, positive=1.0) is allowed


def test_a_query_with_several_positives_has_as_many_negatives_left_as_others(tmp_path, monkeypatch):
    # The three best documents of the first query are its positives, and range_max leaves none to spare.
    similarities = torch.stack([-torch.arange(10.0), torch.arange(10.0)])
    documents = Dataset.from_dict({"text": list(map(str, range(10)))})
    pairs = Pairs(Dataset.from_dict({"text": ["a", "b"]}), documents, [(0, 0), (0, 1), (0, 2), (1, 9)], "")

    def search(_, part, k):
        best = similarities[:, part].topk(min(k, len(part)))
        return best.values, best.indices

    monkeypatch.setattr(negatives, "encode", lambda *args, **kwargs: None)
    monkeypatch.setattr(negatives, "_encoded", lambda model, documents, *_: list(map(int, documents["text"][:])))
    monkeypatch.setattr(negatives, "search", search)
    rules = {"range_min": 1, "num_negatives": 2, "range_max": 3, "documents_per_part": 4}
    section = MiningSection(pairs=DataSection(source="hub", name="a"), teacher="b", **rules)
    common = {"model": {"name_or_path": "c"}}
    found = negatives.search_documents(None, pairs, section, resumable.Work(tmp_path, PartialState()), common)
    assert negatives.hard_negatives(pairs, section, *found, [0.0, 0.0]) == {0: [4, 5], 1: [7, 6]}


def test_negatives_are_chosen_without_a_copy_of_all_scores_as_python_numbers():
    queries, k = 2000, 100
    scores = torch.rand(queries, k).sort(descending=True).values
    section = MiningSection(pairs=DataSection(source="hub", name="a"), teacher="b", num_negatives=1, range_max=k - 1)
    rows = [(query, 0) for query in range(queries)]
    pairs = Pairs(Dataset.from_dict({"text": list(map(str, range(queries)))}), None, rows, "")
    found = torch.randint(1, 10**6, (queries, k))
    tracemalloc.start()
    try:
        chosen = negatives.hard_negatives(pairs, section, scores, found, [2.0] * queries)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert chosen == {query: [found[query, 0].item()] for query in range(queries)}
    assert peak < 20 * scores.numel()  # and not 76 bytes each


def test_which_pairs_are_kept_depends_on_the_seed(tmp_path):
    rows = {"query": [f"question {i}" for i in range(60)], "answer": [f"answer {i}" for i in range(60)]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "pairs.parquet")
    data = DataSection(source="files", files=[str(tmp_path / "pairs.parquet")], max_rows=8)
    first, again, other = (
        load_pairs(MiningSection(pairs=replace(data, seed=seed), teacher="none")).queries["text"][:]
        for seed in (0, 0, 1)
    )
    assert len(first) == 8 and first == again and set(first) != set(other)


@pytest.mark.parametrize("family", ["modernbert", "bert", "xlm-roberta"])
def test_the_whole_loop_and_a_colbert_teacher(family, encoder, teacher, tmp_path):
    recipe = recipe_for(tmp_path, encoder(family), teacher)
    mining_mine.mine(recipe)
    assert not (tmp_path / "mined.unfinished").exists()
    results = []
    for fast in (False, True):
        switched = replace(recipe.fast, enabled=fast, stock_masking=fast)
        results.append(train(replace(recipe, fast=switched, output_dir=str(tmp_path / f"fast-{fast}"))))
    for (_, expected), (_, got) in zip(*(result["losses"] for result in results), strict=True):
        assert got == pytest.approx(expected, rel=1e-3) and expected > 1e-3
    assert results[0]["steps"] == 2 and 0 <= results[0]["ndcg@10"] <= 1

    # Once more from the trained model, which is also a ColBERT that can teach.
    model = results[1]["model"]
    again = [f"data.name={tmp_path / 'mined-2'}", "mining.teacher_type=colbert", f"output_dir={tmp_path / 'out-2'}"]
    second = recipe_for(tmp_path, model, model, *again)
    mining_mine.mine(second)
    scores = Dataset.from_parquet(str(tmp_path / "mined-2" / "train.parquet"))["scores"][:]
    # Documents that the tokenizer makes the same are scored the same.
    assert all(min(row) == 0 and max(row) <= 1 for row in scores)
    assert sum(max(row) == pytest.approx(1) for row in scores) > len(scores) / 2
    # The student is its own teacher, and there is nothing to learn.
    assert train(second)["losses"][0][1] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("stage", ["search", "teacher"])
def test_an_interrupted_run_goes_on_and_ends_the_same(stage, encoder, teacher, tmp_path, monkeypatch, capsys):
    whole = recipe_for(tmp_path, encoder("modernbert"), teacher, f"data.name={tmp_path / 'whole'}")
    mining_mine.mine(whole)
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    seen = mine_but_stop(recipe, stage, 2, monkeypatch)
    assert not (tmp_path / "mined").exists()

    capsys.readouterr()
    write, written = resumable.write_whole, []
    monkeypatch.setattr(resumable, "write_whole", lambda file, writer: (written.append(file.name), write(file, writer)))
    mining_mine.mine(recipe)
    assert len(seen) == 2 and not set(seen) & set(written)
    # The bar begins where the first run stopped, after two parts.
    first, total = (30, 40) if stage == "search" else (18, 40)
    title = "Searching" if stage == "search" else "Asking the teacher"
    bars = [line for line in re.split("[\r\n]", capsys.readouterr().err) if line.startswith(title)]
    assert f" {first}" in bars[0].split("|")[2] and f"{total}" in bars[-1].split("|")[2] and "100%" in bars[-1]
    for name in ("train", "queries", "documents"):
        whole_file, file = (tmp_path / folder / f"{name}.parquet" for folder in ("whole", "mined"))
        assert whole_file.read_bytes() == file.read_bytes()
    written.clear()
    assert mining_mine.mine(recipe)["rows"] and not written  # nothing is left to do


def test_texts_of_several_types_and_places_are_told_apart_by_what_they_say(tmp_path):
    pairs = {"query": ["a", "b", "a", "a"], "text": ["x", "y", "z", "x"]}
    pq.write_table(pa.table(pairs), tmp_path / "pairs.parquet")
    corpus = pa.table({"passage": pa.array(["w", "y", "", "w", "x\0", "X"], pa.large_string())})
    pq.write_table(corpus, tmp_path / "corpus.parquet")
    files = {
        name: DataSection(source="files", files=[str(tmp_path / f"{name}.parquet")]) for name in ("pairs", "corpus")
    }
    loaded = load_pairs(MiningSection(**files, teacher="none"))
    assert loaded.queries["text"][:] == ["a", "b"]
    assert loaded.documents["text"][:] == ["x", "y", "z", "w", "", "x\0", "X"]
    assert loaded.rows == [(0, 0), (1, 1), (0, 2)] and loaded.positives() == [{0, 2}, {1}]
    few = replace(files["corpus"], max_rows=2)
    assert 3 <= len(load_pairs(MiningSection(**{**files, "corpus": few}, teacher="none")).documents) <= 5

    pq.write_table(pa.table({"query": ["a", "b"], "text": ["x", None]}), tmp_path / "pairs.parquet")
    with pytest.raises(RecipeError, match="mining.pairs.columns: 'text' must hold a text in every row, but some have"):
        load_pairs(MiningSection(**files, teacher="none"))


def test_other_settings_and_other_peoples_folders_are_refused(encoder, teacher, tmp_path):
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    mining_mine.mine(recipe)
    changed = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.range_min=0")
    with pytest.raises(RecipeError, match="was mined with other settings; keep them, choose another folder, or "):
        mining_mine.mine(changed)
    # How the work is cut into pieces decides about nothing.
    pieces = ["mining.batch_size=3", "mining.documents_per_part=7", "mining.rows_per_part=50"]
    assert mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, *pieces))["rows"]
    # A recipe that cannot be mined removes nothing, nor is anything left of it.
    wrong = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.teacher=/no/such/model")
    with pytest.raises(RecipeError, match="mining.teacher /no/such/model cannot be loaded: "):
        mining_mine.mine(wrong, resume=False)
    assert (tmp_path / "mined" / "mining.json").exists() and not (tmp_path / "mined.unfinished").exists()
    assert mining_mine.mine(changed, resume=False)["rows"]
    with pytest.raises(RecipeError, match="data.name must be a folder for mining to write, but .* something else"):
        mining_mine.mine(
            recipe_for(tmp_path, encoder("modernbert"), teacher, f"data.name={tmp_path / 'pairs'}"), resume=False
        )
    assert (tmp_path / "pairs" / "README.md").exists()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("mining.range_max=3", "mining.range_max must be at least range_min + num_negatives, got 3, 1 and 3."),
        ("mining.pairs.source=docstrings", "mining.pairs."),
        ("model={build: {}}", "model.build does not apply to fastmaxsim mine, which searches with model.name_or_path."),
        ("mining.pairs.columns=[query, positive]", "mining.pairs.columns: no column 'positive'"),
        (
            "mining.pairs.columns=[answer, query]",
            "mining.pairs.columns must be the query and its positive, in this order, got answer, query.",
        ),
        ("mining.corpus={source: docstrings, packages: [numpy]}", "mining.corpus.source must be hub or files, got"),
        (
            "mining.corpus={source: hub, name: a, columns: [b, c]}",
            "mining.corpus.columns must name one column, got b, c",
        ),
        (
            "mining.corpus={source: hub, name: PAIRS}",
            "mining.corpus.columns must be the text of a document, got query,",
        ),
        ("mining.corpus={source: hub, name: a/b}", "mining.corpus.name cannot be loaded: "),
        ("mining.max_score=-100", "mining: no query has as many negatives as mining.num_negatives"),
        ("mining.teacher=no-such-owner/no-such-model", "mining.teacher no-such-owner/no-such-model cannot be loaded: "),
    ],
)
def test_what_does_not_fit_gets_one_sentence(override, sentence, encoder, teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError) as error:
        override = override.replace("PAIRS", str(tmp_path / "pairs"))
        mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, override))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_the_command_says_what_was_mined_and_what_a_full_disk_leaves(encoder, teacher, tmp_path, monkeypatch):
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(asdict(recipe)))

    def full(file, writer):
        raise OSError(28, "No space left on device", str(file))

    with monkeypatch.context() as patch:
        patch.setattr(resumable, "write_whole", full)
        failed = CliRunner().invoke(app, ["mine", str(file)])
    assert failed.exit_code == 1 and "No space left on device" in failed.output and "is kept" in failed.output
    done = CliRunner().invoke(app, ["mine", str(file)])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "mined" / "mining.json").read_text())["rows"]
    assert f"{rows}" in done.output and "mined" in done.output
