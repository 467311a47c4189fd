"""Bad input of operators, and the sentence that each gets."""

import importlib
import logging
import operator
import sys
from functools import partial

import numpy as np
import pytest
import torch

from pylate_fastmaxsim import (
    LogSumExp,
    PooledScores,
    Softmax,
    TokenBatch,
    TopK,
    compress,
    maxsim,
    maxsim_from_hidden,
    pool_tokens,
    pooled_scores,
    splade_pool,
    xtr_scores,
)
from pylate_fastmaxsim.ops import operands
from pylate_fastmaxsim.ops.encoder.attention import rotary_self_attention, text_attention
from pylate_fastmaxsim.ops.encoder.layers import geglu_linear, norm_with_residual
from pylate_fastmaxsim.ops.projection import project_normalize
from tests.support.attention_cases import case as attention_case
from tests.support.attention_cases import rotary_arguments
from tests.support.ragged_batches import batches

Q, D, ONE = torch.zeros(2, 3, 4), torch.zeros(5, 6, 4), torch.ones(1, 1, 1)
TEXTS, WEIGHT, LOW = torch.ones(2, 3, 4), torch.ones(5, 4), torch.float8_e5m2
INT8 = compress(TokenBatch.from_padded(D), "int8")
NESTED = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)])


def wrong_rotary(place, value):
    arguments = list(rotary_arguments())
    arguments[place] = value
    return rotary_self_attention(*arguments)


def hidden(**options):
    tensors = {"queries": torch.ones(1, 1, 2), "documents": torch.ones(2, 3, 4), "weight": torch.ones(2, 4)}
    return maxsim_from_hidden(**tensors | options)


# Name of the call, the call, type of the error, and what it says behind the name.
REFUSED = [
    ("maxsim", lambda: maxsim(Q, D[0]), ValueError, r"documents must be \[N, L, d\], got one text of shape \(6, 4\); pass it as x.None."),
    ("maxsim", lambda: maxsim(Q, D[None]), ValueError, r"documents of each query must begin with \[Nq, K\] = \[2, 5\], got shape \(1, 5"),
    ("maxsim", lambda: maxsim(Q, D[None, :2], Q), ValueError, r"candidates go with documents \[Nd, L, d\], not with \[Nq, K, L, d\]"),
    ("maxsim", lambda: maxsim(Q, D, documents_mask=torch.tensor([3, 7, 0, 1, 2])), ValueError, "documents_mask as lengths must be from 0 to L = 6, got 7"),
    ("maxsim", lambda: maxsim(Q, D, documents_mask=torch.tensor([3, 7])), ValueError, r"documents_mask must be \[N\] = \[5\] as lengths, got torch.int64 of shape \(2,"),
    ("maxsim", lambda: maxsim(Q, D, queries_mask=torch.ones(2, 4)), ValueError, r"queries_mask must be \[N, L\] = \[2, 3\]"),
    ("maxsim", lambda: maxsim(Q, TokenBatch.from_padded(D), documents_mask=torch.ones(5, 6)), ValueError, "documents_mask goes with"),
    ("maxsim", lambda: maxsim(Q, D.to("meta")), ValueError, "queries are on cpu and documents on meta"),
    ("maxsim", lambda: maxsim(Q, D[..., :3]), ValueError, "queries have d = 4 and documents d = 3"),
    ("maxsim", lambda: maxsim(Q, D, torch.zeros(3, 1, dtype=torch.int64)), ValueError, r"candidates must be int64 \[Nq, K\] with Nq"),
    ("maxsim", lambda: maxsim(Q, D, zero_floor=torch.zeros(4, dtype=torch.bool)), ValueError, r"zero_floor must be bool \[Nd\]"),
    ("maxsim", lambda: maxsim(Q, D, zero_floor=[False] * 5), TypeError, r"zero_floor must be a tensor bool \[Nd\] with Nd = 5, got list"),
    ("maxsim", lambda: maxsim("texts", D), TypeError, r"queries must be a TokenBatch, a tensor \[N, L, d\] or a list of matrices .* got str"),
    ("maxsim", lambda: maxsim([], D), ValueError, r"queries must hold at least one \[L, d\]; an empty list"),
    ("maxsim", lambda: maxsim([[1.0]], D), TypeError, r"each of queries must be a tensor \[L, d\], got list"),
    ("maxsim", lambda: maxsim([Q[0], Q[0, :, :3].numpy()], D), ValueError, r"each of queries must be \[L, d\], of the d, .* \(3, 4\) on cpu and torch.float32 \(3, 3\)"),
    ("maxsim", lambda: maxsim([Q[0], Q[0].double()], D), ValueError, r"each of queries must be .* torch.float32 .* and torch.float64"),
    ("maxsim", lambda: maxsim([Q[0].int().numpy()], D), ValueError, "each of queries must be floating point, got int32 of NumPy"),
    ("pooled_scores", lambda: pooled_scores(Q[0].numpy(), D, pooling=TopK(2)), ValueError, r"queries must be \[N, L, d\], got one text of shape \(3, 4\)"),
    ("maxsim", lambda: maxsim([*Q], D, queries_mask=torch.ones(2, 3)), ValueError, "queries_mask goes with padded queries; a list has no padding"),
    ("maxsim", lambda: maxsim(Q, NESTED), ValueError, r"padded documents must be a plain tensor \[N, L, d\], got a nested one; .* x.offsets"),
    ("maxsim", lambda: maxsim(Q, D, save_documents="fp8"), ValueError, 'save_documents must be "int8" or None'),
    ("maxsim", lambda: maxsim(Q, INT8, zero_floor=torch.ones(5).bool()), ValueError, "zero_floor goes with documents that are not compressed"),
    ("maxsim", lambda: maxsim(Q, INT8, save_documents="int8"), ValueError, "save_documents goes with documents that are not compressed"),
    ("maxsim", lambda: maxsim(Q[..., :3], INT8), ValueError, "queries have d = 3 and documents d = 4; both must have one d"),
    ("maxsim", lambda: maxsim(Q, INT8, torch.full((2, 1), 5)), ValueError, "candidates must be from 0 to Nd - 1 = 4, got 5 to 5"),
    ("maxsim", lambda: maxsim(INT8, Q), TypeError, "queries are a CompressedBatch.*decompress"),
    ("pooled_scores", lambda: pooled_scores(Q, INT8, torch.full((2, 1), 5), pooling=TopK(2)), ValueError, "candidates must be from 0 to Nd - 1 = 4, got 5 to 5"),
    ("xtr_scores", lambda: xtr_scores(Q, INT8, 1), TypeError, "documents are a CompressedBatch.*decompress"),
    ("xtr_scores", lambda: xtr_scores(Q, D, 0), ValueError, "k must be at least 1, got 0"),
    *(("xtr_scores", lambda k=k: xtr_scores(Q, D, k), TypeError, f"k must be an integer, at least 1, got {k!r}.") for k in (2.5, "3", True)),
    ("xtr_scores", lambda: xtr_scores(Q, D, 1, normalizer="paper"), ValueError, 'normalizer must be "positive" or "retrieved", got .paper'),
    ("xtr_scores", lambda: xtr_scores(Q, D, 1, zero_floor=torch.ones(5).bool(), normalizer="retrieved"), ValueError, 'zero_floor goes with normalizer="positive" only'),
    ("xtr_scores", lambda: xtr_scores(Q, D, 1, [[0], [0]]), TypeError, "candidates must be a tensor .* got list"),
    ("TopK", lambda: TopK(0), ValueError, "k must be at least 1, got 0"),
    *(("TopK", lambda k=k: TopK(k), TypeError, f"k must be an integer, at least 1, got {k!r}") for k in (2.5, True)),
    *(("Softmax", lambda t=t: Softmax(t), ValueError, f"temperature must be a number from 1e-30 to 1e30, got {t}") for t in (0, 1e-300, float("nan"))),
    ("LogSumExp", lambda: LogSumExp("1"), TypeError, "temperature must be a number from 1e-30 to 1e30, got '1'"),
    *(("pooled_scores", lambda p=p: pooled_scores(ONE, ONE, pooling=p), TypeError, r"pooling must be Max\(\)") for p in ("max", TopK)),
    ("PooledScores", lambda: PooledScores(own_documents=True)(Q, D[:3]), ValueError, "with own_documents=True there must be as many queries as documents .* got 2 and 3; a contrastive loss takes"),
    ("pool_tokens", lambda: pool_tokens(D), ValueError, "give either factor or count"),
    ("pool_tokens", lambda: pool_tokens(D, 2, count=2), ValueError, "give either factor or count"),
    ("pool_tokens", lambda: pool_tokens(D, 0.5), ValueError, "factor must be at least 1 and finite, got 0.5"),
    ("pool_tokens", lambda: pool_tokens(D, "two"), TypeError, "factor must be a number, at least 1, got 'two'"),
    ("pool_tokens", lambda: pool_tokens(D, count=0), ValueError, "count must be at least 1, got 0"),
    ("pool_tokens", lambda: pool_tokens(D, 2, protected=-1), ValueError, "protected must be at least 0, got -1"),
    ("pool_tokens", lambda: pool_tokens(D.to(LOW), 2), ValueError, "documents must be bfloat16, float16, float32 or float64"),
    ("pool_tokens", lambda: pool_tokens(TokenBatch.from_padded(D).select(torch.tensor([0, 0])), 2), ValueError, "documents must not share rows"),
    ("splade_pool", lambda: splade_pool(TEXTS[0], WEIGHT), ValueError, "hidden states must be .N, L, d., got one text of shape .3, 4."),
    ("splade_pool", lambda: splade_pool(TEXTS, WEIGHT, mask=torch.full((2, 3), 2)), ValueError, "mask must hold 1 for tokens that count"),
    ("splade_pool", lambda: splade_pool(TEXTS, [1.0]), TypeError, "weight must be a tensor .V, d., got list"),
    ("splade_pool", lambda: splade_pool(TEXTS, WEIGHT.T), ValueError, "weight must be .V, d. with d = 4, got torch.float32 of shape .4, 5."),
    ("splade_pool", lambda: splade_pool(TEXTS, WEIGHT.double()), ValueError, "hidden states are torch.float32 and weight torch.float64"),
    ("splade_pool", lambda: splade_pool(TEXTS.to(LOW), WEIGHT.to(LOW)), ValueError, "hidden states must be bfloat16, float16, float32 or float64"),
    ("splade_pool", lambda: splade_pool(TEXTS, WEIGHT, torch.ones(4)), ValueError, "bias must be floating point .V. with V = 5, got torch.float32 of shape .4"),
    ("splade_pool", lambda: splade_pool(TEXTS, WEIGHT.to("meta")), ValueError, "weight must be on cpu, as the rest, got meta"),
    ("splade_pool", lambda: splade_pool(TEXTS, WEIGHT, activation_function="gelu"), ValueError, 'activation_function must be "relu", "log1p_relu" or None, got .gelu'),
    ("splade_pool", lambda: splade_pool(TEXTS, WEIGHT, activation_function=None), ValueError, "activation_function=None needs log1p=False"),
    ("splade_pool", lambda: splade_pool(TEXTS, WEIGHT, log1p=1), TypeError, "log1p must be True or False, got 1"),
    ("project_normalize", lambda: project_normalize(Q[0], WEIGHT.T), ValueError, r".*weight \[d, d_model\], got shapes \(3, 4\) and \(4, 5\)"),
    ("project_normalize", lambda: project_normalize(Q[0], WEIGHT.double()), ValueError, ".* must have one dtype"),
    ("project_normalize", lambda: project_normalize(Q[0].int(), WEIGHT.int()), ValueError, "hidden states must be bfloat16"),
    ("project_normalize", lambda: project_normalize(Q[0], WEIGHT, torch.ones(3)), ValueError, r"bias must be torch.float32 \[d\] with d = 5"),
    ("project_normalize", lambda: hidden(weight=[[1.0] * 4] * 2), TypeError, "weight must be a tensor .* got list"),
    ("project_normalize", lambda: hidden(normalize=None), TypeError, "normalize must be True or False, got None."),
    ("maxsim_from_hidden", lambda: hidden(project="neither"), ValueError, "project must be .* got 'neither'"),
    ("text_attention", lambda: text_attention(*attention_case([3]), dropout=1.0), ValueError, "dropout must be from 0 to less than 1"),
    ("rotary_self_attention", lambda: wrong_rotary(8, 9), ValueError, "weight must be .* d = 16, 32, 64 or 128, got shape"),
    ("rotary_self_attention", lambda: wrong_rotary(3, torch.ones(14, 8)), ValueError, r"cos must be .T, d. = .14, 16."),
    ("geglu_linear", lambda: geglu_linear(torch.zeros(5, 14), torch.zeros(3, 8), None), ValueError, r"x must be .* got shapes \(5, 14\) and \(3, 8\)"),
    ("norm_with_residual", lambda: norm_with_residual(torch.zeros(5, 16), torch.ones(16), None, 1e-5, torch.zeros(3, 8)), ValueError, r".* got shapes \(5, 16\), \(3, 8\) and \(16,\)"),
]  # fmt: skip


@pytest.mark.parametrize("name, call, error, message", REFUSED, ids=[f"{row[0]}-{i}" for i, row in enumerate(REFUSED)])
def test_bad_input_is_one_sentence(name, call, error, message):
    with pytest.raises(error, match=f"^{name}: {message}"):
        call()


@pytest.mark.parametrize("function", [maxsim, partial(xtr_scores, k=3)], ids=["maxsim", "xtr_scores"])
def test_sequences_that_share_rows_are_refused_where_gradients_are_wanted(function):
    queries, documents = batches(queries=(3, 2), documents=(4, 0, 3), masked=False)
    queries, documents = queries.select(torch.tensor([0, 0, 1])), documents.select(torch.tensor([0, 1, 2, 1, 1]))
    twice = documents.select(torch.tensor([0, 2, 0]))
    learned, learned_twice = (each.with_values(each.values.clone().requires_grad_()) for each in (documents, twice))
    function(queries, twice)
    with torch.no_grad():
        function(queries, learned_twice)
    with pytest.raises(ValueError, match="queries must not share rows of values"):
        function(queries, learned)
    queries = queries.select(torch.tensor([0, 2]))
    # A document without a token is in nobody's way.
    function(queries, learned).sum().backward()
    function(queries.with_values(queries.values.clone().requires_grad_()), twice).sum().backward()
    with pytest.raises(ValueError, match="documents must not share rows of values"):
        function(queries, learned_twice)


def test_queries_of_compressed_documents_and_texts_of_splade_may_not_share_rows_either():
    texts = TokenBatch.from_padded(TEXTS).select(torch.tensor([0, 0]))
    learned = texts.with_values(texts.values.clone().requires_grad_())
    with pytest.raises(ValueError, match="maxsim: queries must not share rows"):
        maxsim(learned, INT8)
    assert torch.equal(splade_pool(texts, WEIGHT), splade_pool(TEXTS, WEIGHT))
    with pytest.raises(ValueError, match="splade_pool: texts must not share rows of values where gradients are wanted"):
        splade_pool(learned, WEIGHT)
    # The weight's gradient does not mind.
    splade_pool(texts, WEIGHT.clone().requires_grad_()).sum().backward()


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("function", [maxsim, partial(xtr_scores, k=3)], ids=["maxsim", "xtr_scores"])
@pytest.mark.parametrize("out_of_range", [-1, 5])
def test_candidates_out_of_range_are_refused_wherever_they_are_used(function, out_of_range):
    candidates = torch.tensor([[0], [out_of_range]])
    for call, queries, documents, chosen in (
        (function, Q, D, candidates),
        (torch.compile(function, backend="aot_eager", fullgraph=True), Q, D, candidates),
        (function, Q, D, candidates.as_subclass(_Subclass)),
        (function, Q.clone().requires_grad_(), D, candidates),
        (function, Q[:, :0], D[:, :0], candidates),  # nothing to score
    ):
        with pytest.raises(ValueError, match=r"^(maxsim|xtr_scores): candidates must be from 0 to Nd - 1 = 4, got "):
            call(queries, documents, candidates=chosen)


def test_numbers_of_numpy_and_those_that_a_kernel_cannot_count_are_taken():
    assert TopK(np.int64(3)) == TopK(3) and Softmax(np.float32(0.5)) == Softmax(0.5)
    assert torch.equal(xtr_scores(D[:2], D, 2**63), xtr_scores(D[:2], D, 100))


@pytest.mark.parametrize(
    "capability, triton, said",
    [
        ((7, 5), True, ["capability 8.0 or newer"]),
        ((8, 0), True, []),
        ((12, 1), True, []),
        ((9, 0), False, ["Triton cannot be imported"]),
    ],
)
def test_without_kernels_pytorch_scores_and_that_is_said_once(capability, triton, said, monkeypatch, caplog):
    if not triton:
        monkeypatch.setitem(sys.modules, "pylate_fastmaxsim.kernels.maxsim.launch", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    # The module again, with caches that end with the test.
    monkeypatch.setattr("pylate_fastmaxsim.ops.operands", operands)
    monkeypatch.delitem(sys.modules, "pylate_fastmaxsim.ops.operands")
    module = importlib.import_module("pylate_fastmaxsim.ops.operands")
    with caplog.at_level(logging.WARNING, "pylate_fastmaxsim"):
        assert [module.has_kernels(torch.device("cuda", 0)) for _ in range(2)] == [not said] * 2
    assert len(caplog.messages) == len(said) and all(map(operator.contains, caplog.messages, said))
