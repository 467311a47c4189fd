"""Losses on a GPU in 16 bits, as exact as stock: packed, with the attention that PyTorch ships, and in CUDA graphs."""

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from pylate import losses
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.encoding.attention import variable_length_attention
from pylate_fastmaxsim.integrations.models.encoders import encoder_of
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka
from tests.support.loss_hosts import VIEWS, ByHand
from tests.support.losses_cuda import LOSS_SCALE, assert_as_exact, batch_of, losses_of, stock_losses
from tests.support.models import checkpointed, features, load_model, sentences
from tests.support.on_gpu import no_waiting

pytestmark = pytest.mark.cuda


@pytest.fixture
def small(encoder):
    def load(family: str = "modernbert", checkpointing: bool | None = None, **changes: object):
        if family == "wide modernbert":
            # Its local layers see all of a query, so that queries are encoded with the documents; so are those of BERT.
            family, changes = "modernbert", {"local_attention": 24, **changes}
        path = encoder(family, hidden_size=64, intermediate_size=96, **changes)
        model = load_model(path, document_length=48, device="cuda")
        if checkpointing is not None:
            checkpointed(model, checkpointing)
        return model

    return load


def graphs_of(model) -> dict:
    # Of each size its graphs: whether steps were recorded shows nowhere else.
    return encoder_of(model)._compiled_call_impl._recorded


LENGTHS = torch.tensor([5, 1, 0, 300, 17, 9])


@pytest.mark.parametrize("window", [(-1, -1), (20, 20), (-1, 0), (20, 0)])
@pytest.mark.parametrize("attended", [LENGTHS, torch.tensor([3, 1, 0, 300, 4, 9])], ids=["all", "fewer"])
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 2), (torch.float16, 6)])
def test_attention(heads, dtype, attended, window):
    """Behind each text may come rows, as of queries, of a text of which no row attends, and nobody to them."""
    if window[1] == 0 and attended is not LENGTHS:
        pytest.skip("rows of causal encoders all attend")
    generator = torch.Generator("cuda").manual_seed(0)
    ends = LENGTHS.cumsum(0)
    rows, keys = ends, None
    if attended is not LENGTHS:
        rows = ends.repeat_interleave(2)
        keys = F.pad(torch.stack([ends - LENGTHS + attended, ends], dim=1).flatten(), (1, 0)).int().cuda()
    rows = F.pad(rows, (1, 0)).int().cuda()
    on_gpu = {"generator": generator, "device": "cuda"}
    inputs = [torch.randn(int(ends[-1]), count, 64, dtype=dtype, **on_gpu) for count in (heads, 2, 2)]
    text = torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS).cuda()
    place = torch.arange(len(text)).cuda() - (ends - LENGTHS).cuda()[text]
    distance = place[:, None] - place
    # A window shows the long text in part, the others whole.
    seen = (text[:, None] == text) & (place < attended.cuda()[text])
    seen &= (distance <= window[0]) | (window[0] < 0)
    seen &= (-distance <= window[1]) | (window[1] < 0)
    exact = [states.double().requires_grad_() for states in inputs]
    turned = (states.transpose(0, 1) for states in exact)
    expected = F.scaled_dot_product_attention(*turned, attn_mask=seen, enable_gqa=True)
    upstream = torch.randn(len(text), heads, 64, **on_gpu).to(dtype)
    expected.backward(upstream.double().transpose(0, 1))
    for _ in range(3):
        for states in inputs[:2]:  # what a kernel does not write of the tensors that are made next shows
            _ = [torch.full_like(states, float("nan")) for _ in range(20)]
        ours = [states.clone().requires_grad_() for states in inputs]
        options = {"scale": None, "window": window, "dropout": 0.0}
        output = variable_length_attention(*ours, rows, 300, key_cu_seqlens=keys, **options)
        output.backward(upstream)
        torch.testing.assert_close(output.double(), expected.transpose(0, 1), atol=2e-2, rtol=2e-2)
        for own, other in zip(ours, exact, strict=True):
            torch.testing.assert_close(own.grad.double(), other.grad, atol=5e-2, rtol=5e-2)
        for states in ours[1:]:
            assert not states.grad[place >= attended.cuda()[text]].any()


def one_column(model, **_) -> list[dict]:
    return features(model, sentences(16, longest=8), sentences(32, seed=1))


cached = partial(losses.CachedContrastive, mini_batch_size=5)
distillation = partial(losses.Distillation, normalize_scores=False)
by_tokens = partial(ContrastiveDistillation, mini_batch_tokens=300)


def cut(make: Callable, pooled: bool = False) -> Callable:
    return lambda model: Matryoshka(model, make(model), **VIEWS, pooled=pooled)


def with_labels(make: Callable) -> Callable:
    def scored(model):
        loss = make(model)
        labels = torch.rand(16, 2, generator=torch.Generator().manual_seed(0)).cuda()
        return lambda columns, _: loss(columns, labels[: len(columns[0]["input_ids"])])

    return scored


class Case(NamedTuple):
    family: str
    make: Callable = losses.Contrastive
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = False
    # Whether gradient checkpointing is reentrant.
    checkpointing: bool | None = None
    batch: Callable = batch_of
    # Of PyLate's losses. Ours follow its rule of masks only if asked for.
    stock_masking: bool = True


FAMILIES = "modernbert", "wide modernbert", "bert", "qwen3"
CASES = [Case(family, make) for family in FAMILIES for make in (losses.Contrastive, cached)]
CASES += [Case("modernbert", make, torch.float16) for make in (losses.Contrastive, cached)]
CASES += [
    Case("wide modernbert", checkpointing=True),
    Case("wide modernbert", compiled=True),
    Case("wide modernbert", compiled=True, checkpointing=False),
    Case("bert", compiled=True, dtype=torch.float16),
    Case("qwen3", compiled=True),
]
for _compiled in (False, True):
    CASES += [
        Case("wide modernbert", make, compiled=_compiled, stock_masking=False)
        for make in (ByHand, ContrastiveDistillation, by_tokens)
    ]
    CASES += [
        Case("wide modernbert", cut(make, pooled), compiled=_compiled)
        for make in (losses.Contrastive, cached)
        for pooled in (False, True)
    ]
    CASES.append(Case("wide modernbert", cut(distillation), compiled=_compiled, batch=one_column))


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_as_exact_as_stock(small, case):
    model, make = small(case.family), with_labels(case.make)
    sizes = enumerate((15, 11, 15, 15, 11, 11) if case.compiled and case.make is losses.Contrastive else (16,))
    batches = [case.batch(model, seed=seed, count=count) for seed, count in sizes]
    expected = stock_losses(model, batches, make, autocast=case.dtype)
    if case.checkpointing is not None:
        model = small(case.family, case.checkpointing)
    with pylate_fastmaxsim.enabled(compile=case.compiled, stock_masking=case.stock_masking):
        for _ in range(4 if case.compiled else 1):
            ours = losses_of(model, batches, make, autocast=case.dtype)
            assert_as_exact(ours, expected)
        assert set(modes.chosen[model].values()) == {"packed"}
        if case.make is losses.Contrastive:
            joint = case.family in ("wide modernbert", "bert")
            assert (set(modes.joined.get(model, {}).values()) == {True}) == joint
        if case.compiled and case.make is losses.Contrastive:
            assert graphs_of(model)
            # The same batches again: what was kept of the last ones changes nothing.
            assert losses_of(model, batches, make, autocast=case.dtype)[0].equal(ours[0])


# Losses of a family, and whether they are compiled.
WAITING = [(family, losses.Contrastive, False) for family in FAMILIES]
WAITING += [("wide modernbert", losses.Contrastive, True)]
for _make in (ByHand, ContrastiveDistillation, cut(ContrastiveDistillation), cut(ContrastiveDistillation, True)):
    WAITING.append(("wide modernbert", _make, False))


@pytest.mark.parametrize("family, make, compiled", WAITING)
def test_a_step_waits_for_nothing(small, family, make, compiled):
    model = small(family)
    pylate_fastmaxsim.enable(compile=compiled)
    batch, loss = batch_of(model), with_labels(make)(model)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            value = loss([dict(column) for column in batch], None)
        value.backward()

    for _ in range(3 if compiled else 1):
        step()
    assert set(modes.chosen[model].values()) == {"packed"}
    assert not compiled or graphs_of(model)
    torch.cuda.synchronize()
    with no_waiting():
        step()


def test_dropout_is_drawn_anew_and_repeats_with_its_seed(small):
    model = small("bert", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2).train()
    batch = batch_of(model)
    with pylate_fastmaxsim.enabled(compile=True):
        for _ in range(3):
            losses_of(model, [batch])
        assert graphs_of(model) and set(modes.chosen[model].values()) == {"packed"}
        torch.manual_seed(3)
        first, second = losses_of(model, [batch]), losses_of(model, [batch])
        torch.manual_seed(3)
        again = losses_of(model, [batch])
    assert first[0] != second[0] and first[0] == again[0]
    for name in first[1]:  # FlashAttention adds gradients in an order that varies
        torch.testing.assert_close(first[1][name], again[1][name], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "checkpointing"), [("modernbert", None), ("wide modernbert", False), ("bert", None), ("qwen3", None)]
)
def test_compiled_layers_do_not_recompile_as_batches_vary(small, family, checkpointing):
    model = small(family, checkpointing)
    # Not 16 queries, which is also the size of a head of Qwen 3: sizes that are equal in the first call count as one,
    # and a layer is compiled once more when they no longer are.
    sizes = list(enumerate((15, 15, 15, 11, 24)))
    expected = stock_losses(model, [batch_of(model, seed=seed, count=count) for seed, count in sizes[2:]])
    torch._dynamo.reset()
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        collated_batches = [batch_of(model, seed=seed, count=count) for seed, count in sizes]
        losses_of(model, collated_batches[:2])
        torch._dynamo.utils.counters.clear()
        ours = losses_of(model, collated_batches[2:])
        assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == 0
    assert_as_exact(ours, expected)


def test_weights_are_read_when_graphs_run(small):
    """An optimizer changes them in place; what autocast keeps of them must not be recorded."""
    model = small("wide modernbert")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [batch_of(model, seed=seed) for seed in range(2)]
    # Each step has a reference with its own weights: after eight steps apart, rounding alone is 5% of a loss.
    weights, ours, expected = [], [], []
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for step in range(8):
            weights.append(copy.deepcopy(model.state_dict()))
            value, _ = losses_of(model, batches[step % 2 :][:1])
            for weight in model.parameters():
                weight.grad /= LOSS_SCALE
            optimizer.step()
            ours.append(value)
        assert graphs_of(model)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        for step, state in enumerate(weights):
            model.load_state_dict(state)
            expected.append(losses_of(model, batches[step % 2 :][:1])[0])
    assert abs(expected[0] - expected[6]) > 0.1 * expected[0]
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0)


def test_memory_of_graphs_is_shared_and_freed(small):
    model = small("wide modernbert", num_hidden_layers=6)
    few, many = (batch_of(model, count=count) for count in (60, 90))
    with pylate_fastmaxsim.enabled(compile=True):
        for batch in (many, many, many, few):
            losses_of(model, [batch])
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(3):
            losses_of(model, [few])
        assert len(graphs_of(model)) == 2
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - before < 2**24
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before


def test_a_mask_changed_behind_its_collator_is_noticed(small):
    model = small("bert")
    pylate_fastmaxsim.enable()
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    rolled = [batch[0], {key: value.roll(1, 0) for key, value in batch[1].items()}]
    shorter = [batch[0], {**batch[1], "attention_mask": batch[1]["attention_mask"].clone()}]
    shorter[1]["attention_mask"][:, 3:] = 0
    with torch.autocast("cuda", torch.bfloat16):
        for columns in (batch, rolled, batch):
            loss_function(columns, None)
            torch.cuda.synchronize()
        # Nothing waits for the answer, so that it may come as late as with the next batch.
        with pytest.raises(ValueError, match="changed after the collator"):
            for columns in (shorter, batch):
                loss_function(columns, None)
                torch.cuda.synchronize()
        loss_function(batch, None)
    assert next(iter(modes.chosen[model].values())) == "packed"
