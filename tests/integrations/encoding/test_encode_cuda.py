"""Packed encoding on a GPU, with the attention that PyTorch ships."""

from __future__ import annotations

import pytest
import torch
from pylate import losses
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.encoding.attention import variable_length_attention
from pylate_fastmaxsim.integrations.encoding.token_counts import known_total
from tests.support.losses_cuda import assert_as_exact, batch_of, losses_of, stock_losses
from tests.support.models import load_model
from tests.support.on_gpu import no_waiting

pytestmark = pytest.mark.cuda

LARGER = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture
def small(encoder):
    def load(family: str = "modernbert", **changes: object):
        if family == "wide modernbert":
            # Its local layers see all of a query, so that queries are encoded with the documents; so are those of BERT.
            family, changes = "modernbert", {"local_attention": 24, **changes}
        return load_model(encoder(family, **LARGER, **changes), document_length=48, device="cuda")

    return load


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
    inputs = [
        torch.randn(int(ends[-1]), count, 64, generator=generator, device="cuda", dtype=dtype)
        for count in (heads, 2, 2)
    ]
    text = torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS).cuda()
    place = torch.arange(len(text)).cuda() - (ends - LENGTHS).cuda()[text]
    distance = place[:, None] - place
    # A window shows the long text in part, the others whole.
    seen = (text[:, None] == text) & (place < attended.cuda()[text])
    seen &= (distance <= window[0]) | (window[0] < 0)
    seen &= (-distance <= window[1]) | (window[1] < 0)
    exact = [states.double().requires_grad_() for states in inputs]
    expected = F.scaled_dot_product_attention(
        *(states.transpose(0, 1) for states in exact), attn_mask=seen, enable_gqa=True
    )
    upstream = torch.randn(len(text), heads, 64, generator=generator, device="cuda").to(dtype)
    expected.backward(upstream.double().transpose(0, 1))
    for _ in range(3):
        for states in inputs[:2]:  # what a kernel does not write of the tensors that are made next shows
            _ = [torch.full_like(states, float("nan")) for _ in range(20)]
        ours = [states.clone().requires_grad_() for states in inputs]
        output = variable_length_attention(
            *ours, rows, 300, scale=None, window=window, dropout=0.0, key_cu_seqlens=keys
        )
        output.backward(upstream)
        torch.testing.assert_close(output.double(), expected.transpose(0, 1), atol=2e-2, rtol=2e-2)
        for own, other in zip(ours, exact, strict=True):
            torch.testing.assert_close(own.grad.double(), other.grad, atol=5e-2, rtol=5e-2)
        for states in ours[1:]:
            assert not states.grad[place >= attended.cuda()[text]].any()


@pytest.mark.parametrize(
    "loss_class, options", [(losses.Contrastive, {}), (losses.CachedContrastive, {"mini_batch_size": 5})]
)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(each, torch.bfloat16) for each in ("modernbert", "wide modernbert", "bert", "qwen3")]
    + [("modernbert", torch.float16)],
)
def test_loss_and_gradients_are_as_exact_as_stock(small, dtype, family, loss_class, options):
    model = small(family)
    batch = batch_of(model)
    expected = stock_losses(model, [batch], loss_class, autocast=dtype, **options)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        ours = losses_of(model, [batch], loss_class, autocast=dtype, **options)
        joint = loss_class is losses.Contrastive and family in ("wide modernbert", "bert")
        assert (set(modes.joined.get(model, {}).values()) == {True}) == joint
    assert_as_exact(ours, expected)


@pytest.mark.parametrize("family", ["modernbert", "wide modernbert", "bert", "qwen3"])
def test_a_step_waits_for_nothing(small, family):
    model = small(family)
    pylate_fastmaxsim.enable()
    batch = batch_of(model)
    loss_function = losses.Contrastive(model)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_function([dict(column) for column in batch], None)
        loss.backward()

    step()
    assert set(modes.chosen[model].values()) == {"packed"}
    torch.cuda.synchronize()
    with no_waiting():
        step()


def test_attention_dropout_is_packed_too(small):
    model = small("bert", attention_probs_dropout_prob=0.1)
    pylate_fastmaxsim.enable()
    _, gradients = losses_of(model, [batch_of(model)])
    assert set(modes.chosen[model].values()) == {"packed"}
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_reentrant_gradient_checkpointing(small):
    model = small("wide modernbert")
    batch = batch_of(model)
    expected = stock_losses(model, [batch])
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": True})
    model[0].auto_model.enable_input_require_grads()
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_as_exact(losses_of(model, [batch]), expected)


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [("modernbert", False), ("wide modernbert", True), ("bert", False), ("qwen3", False)],
)
def test_compiled_layers_do_not_recompile_as_batches_vary(small, family, checkpointing):
    model = small(family)
    if checkpointing:
        model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
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


def test_rows_that_a_gpu_picks_keep_their_counts(encoder):
    model = load_model(encoder("modernbert"), device="cuda")
    pylate_fastmaxsim.enable()
    rows = torch.tensor([1, 1, 0], device="cuda")
    for column in batch_of(model):
        picked = {key: value[rows] for key, value in column.items()}
        assert known_total(picked) == int(picked["attention_mask"].sum())
