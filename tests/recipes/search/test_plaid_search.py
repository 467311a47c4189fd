"""``fastmaxsim search --plaid``: an index of PLAID, searched exhaustively, and what its own search finds of the best."""

import json
import pickle

import numpy as np
import pytest
import torch
from fast_plaid.search import FastPlaid

from pylate_fastmaxsim import read_plaid
from pylate_fastmaxsim.recipes.models.load import load_retriever
from pylate_fastmaxsim.recipes.search.run import Clock
from tests.support.plaid_indexes import PLAID, merge_chunks
from tests.support.saved_models import LATE, SPARSE, embeddings
from tests.support.searches import DOCUMENTS, NAMES, QUERIES, read_run, search


@pytest.fixture
def plaid(saved, tmp_path) -> PLAID:
    """PyLate's index of the documents in another order, without two of them, in the folder plaid/index."""
    index = PLAID(str(tmp_path / "plaid"), "index", nbits=4, device="cpu", show_progress=False)
    index.add_documents(NAMES[::-1], load_retriever(saved(LATE), "cpu").encode(DOCUMENTS[::-1], is_query=False))
    return index.remove_documents(["0003", "0110"])


def test_it_is_searched_exhaustively_and_compared_with_its_own_search(plaid, saved, files, tmp_path, monkeypatch):
    folder, run, result = tmp_path / "plaid" / "index", tmp_path / "run", tmp_path / "result.json"
    order, during, load = [], Clock.during, FastPlaid.__init__
    monkeypatch.setattr(Clock, "during", lambda clock, task: order.append(task) or during(clock, task))
    monkeypatch.setattr(FastPlaid, "__init__", lambda *args, **options: order.append("load") or load(*args, **options))
    done = search(saved(LATE), *files, "--plaid", folder, "--run", run, "--json", result)
    assert order[-2:] == ["load", "PLAID's search"]  # as the time of exhaustive search is without opening the index
    corpus = read_plaid(folder)
    (batch,) = corpus.batches()
    documents = [each[live] for each, live in zip(*batch.decompress(torch.float64).to_padded(), strict=True)]
    queries = embeddings(load_retriever(saved(LATE), "cpu"), QUERIES, is_query=True)
    found = read_run(run)
    for query, scores in zip(queries, found.values(), strict=True):
        exact = [(query.double() @ d.T).amax(dim=1).sum().item() for d in documents]
        assert len(scores) == 148 and scores == pytest.approx(dict(zip(corpus.ids, exact, strict=True)), rel=1e-5)
    own, content = plaid(queries, k=149), json.loads(result.read_text())
    for depth in (10, 100):
        best = [set(list(scores)[:depth]) for scores in found.values()]
        shared = [each & {row["id"] for row in results[:depth]} for each, results in zip(best, own, strict=True)]
        share = sum(map(len, shared)) / depth / len(shared)
        assert share > 0.3 and content["plaid"][f"overlap@{depth}"] == pytest.approx(share)
        assert f"{content['plaid'][f'overlap@{depth}']:.1%} of the top {depth}" in done.stdout
    assert (content["documents"], content["encoded_documents"], content["plaid"]["metrics"]) == (148, 0, None)


def test_an_index_that_does_not_fit_is_one_line(plaid, saved, files, tmp_path):
    folder, packed = tmp_path / "plaid" / "index", tmp_path / "plaid" / "index" / "fast_plaid_index"

    def refused(*arguments: object, model: str = LATE) -> str:
        return search(saved(model), *files, "--plaid", *arguments, code=2).stderr

    needs = "--plaid is an index of its own; it needs a ColBERT and no --index or --pool-factor."
    assert needs in refused(folder, "--index", tmp_path / "index")
    assert needs in refused(folder, model=SPARSE)
    assert "--plaid: read_plaid: " in refused(tmp_path)
    ids = folder / "plaid_ids_to_documents_ids.pkl"
    known = pickle.loads(ids.read_bytes())
    ids.unlink()
    bare = f"--plaid: {packed} has no ids, so it must hold the 150 documents of the corpus in their order"
    assert bare in refused(packed)
    wrong = {"0001": "each document once, but 0001 is there twice.", "x": "x, which is not in the corpus."}
    for name, said in wrong.items():
        ids.write_bytes(pickle.dumps(known | {5: name}))
        assert said in refused(folder)
    ids.write_bytes(pickle.dumps(known))
    np.save(packed / "0.codes.npy", np.load(packed / "0.codes.npy") + 10**6)
    assert "--plaid: Corpus: codes of the documents of " in refused(folder)
    other = PLAID(str(tmp_path / "plaid"), "other", device="cpu", show_progress=False)
    other.add_documents(["0001", "0002"], [torch.eye(8), torch.eye(8)])
    assert "holds embeddings of d = 8, but MODEL makes embeddings of d = 16." in refused(tmp_path / "plaid" / "other")


def test_without_its_own_search_it_says_why(plaid, saved, files, tmp_path):
    folder, result = tmp_path / "plaid" / "index", tmp_path / "result.json"
    (folder / "fast_plaid_index" / "avg_residual.npy").unlink()  # which a search of all does not need
    done = search(saved(LATE), *files, "--plaid", folder, "--json", result)
    assert "not measured: fast-plaid cannot search it: " in " ".join(done.stdout.split())
    assert "fast-plaid cannot search it" in json.loads(result.read_text())["plaid"]["not_searched"]
    merge_chunks(folder / "fast_plaid_index")
    search(saved(LATE), *files, "--plaid", folder, "--run", tmp_path / "run", "--json", result)
    said = "it is of a newer fast-plaid; with fast-plaid 1.4.7 or newer it can be searched"
    assert json.loads(result.read_text())["plaid"]["not_searched"] == said
    assert all(len(scores) == 148 for scores in read_run(tmp_path / "run").values())
