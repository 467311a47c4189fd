"""MaxSim over compressed documents as an operator: what it refuses, graphs, autocast, and documents saved in int8."""

from dataclasses import replace

import pytest
import torch

from pylate_fastmaxsim import Max, TopK, compress, maxsim, maxsim_from_hidden, pooled_scores, xtr_scores
from pylate_fastmaxsim.ops.compressed import SavedAsInt8, _prepared
from tests.support.ragged_batches import batches
from tests.support.residual_codecs import random_codec


@pytest.fixture
def problem():
    queries, documents = batches(masked=False)
    return queries, compress(documents, "int8")


def test_options_of_vectors_are_refused(problem):
    for option in ({"zero_floor": torch.ones(6).bool()}, {"save_documents": "int8"}):
        with pytest.raises(
            ValueError, match=f"maxsim: {next(iter(option))} goes with documents that are not compressed"
        ):
            maxsim(*problem, **option)
    queries, documents = problem
    for call in (
        lambda: maxsim(documents, queries),
        lambda: xtr_scores(queries, documents, 3),
        lambda: pooled_scores(queries, documents, pooling=TopK(2)),
        lambda: maxsim_from_hidden(queries, documents, torch.ones(16, 16)),
    ):
        with pytest.raises(TypeError, match="CompressedBatch.*decompress"):
            call()
    with pytest.raises(ValueError, match="queries have d = 16 and documents d = 8; both must have one d"):
        maxsim(queries, compress(batches(dim=8)[1], "int8"))
    with pytest.raises(ValueError, match="queries must not share rows"):
        repeated = queries.with_values(queries.values.requires_grad_()).select(torch.tensor([0, 0]))
        maxsim(repeated, documents)


def test_maximum_as_a_pooling_takes_them(problem):
    assert torch.equal(pooled_scores(*problem, pooling=Max()), maxsim(*problem))


@pytest.mark.parametrize("format", ["int8", "fp8", "residual"])
def test_one_graph(problem, format):
    queries, documents = batches(masked=False)
    documents = compress(documents, random_codec(16, 4) if format == "residual" else format)

    def run(values):
        return maxsim(queries.with_values(values), documents.to("cpu"))

    values = queries.values.nan_to_num().requires_grad_()
    results = []
    for function in (torch.compile(run, backend="aot_eager", fullgraph=True), run):
        scores = function(values)
        results.append((scores, torch.autograd.grad(scores.square().sum(), values)[0]))
    assert all(map(torch.equal, *results))
    if format != "fp8":  # which the check itself cannot compare
        arguments = (*_prepared(queries, documents, None), False)
        torch.library.opcheck(torch.ops.pylate_fastmaxsim.compressed_forward, arguments)


def test_lengths_that_do_not_fit_are_refused_where_the_graph_is_run(problem):
    queries, documents = problem

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(lengths):
        return maxsim(queries, replace(documents, lengths=lengths))

    assert torch.equal(run(documents.lengths), maxsim(*problem))
    with pytest.raises(ValueError, match="lengths must be from 0 to max_length"):
        run(documents.lengths + documents.max_length)


def test_autocast_casts_queries_for_residual_codes_only():
    queries, documents = batches(masked=False)
    coded = compress(documents, random_codec(16, 4))
    whole = compress(documents, "int8")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, unchanged = maxsim(queries, coded), maxsim(queries, whole)
    assert torch.equal(rounded, maxsim(queries.with_values(queries.values.bfloat16()), coded))
    assert torch.equal(unchanged, maxsim(queries, whole))


@pytest.mark.parametrize("compiled", [False, True])
def test_documents_saved_in_int8_change_the_gradient_of_queries_alone(compiled):
    queries, documents = batches(masked=False)
    results = []
    for save in (None, "int8"):
        vectors = [batch.values.nan_to_num().requires_grad_() for batch in (queries, documents)]

        def run(q, d, save=save):
            return maxsim(queries.with_values(q), documents.with_values(d), save_documents=save)

        function = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled and save else run
        scores = function(*vectors)
        results.append((scores.detach(), *torch.autograd.grad(scores.square().sum(), vectors)))
    (scores, grad_q, grad_d), (own_scores, own_q, own_d) = results
    assert torch.equal(own_scores, scores) and torch.equal(own_d, grad_d)
    assert 0 < (own_q - grad_q).norm() < 1e-2 * grad_q.norm()
    with pytest.raises(ValueError, match='save_documents must be "int8" or None'):
        maxsim(queries, documents, save_documents="fp8")


def test_the_saved_copy_is_in_int8():
    queries, documents = batches(masked=False)
    vectors = [batch.values.nan_to_num().requires_grad_() for batch in (queries, documents)]
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append((x.shape, x.dtype)) or x, lambda x: x):
        scores = maxsim(queries.with_values(vectors[0]), documents.with_values(vectors[1]), save_documents="int8")
    assert SavedAsInt8.__name__ in type(scores.grad_fn).__name__
    assert (documents.values.shape, torch.int8) in sizes and (documents.values.shape, torch.float32) not in sizes
