"""Packed encoding on a GPU, with the attention that PyTorch ships."""

from __future__ import annotations

import logging

import pytest
import torch
from losses_cuda import assert_as_exact, batch_of, losses_of, stock_losses
from models import load_model
from pylate import losses
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.encoding.attention import variable_length_attention
from pylate_fastmaxsim.integrations.encoding.token_counts import known_total

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


@pytest.mark.parametrize("window", [(-1, -1), (3, 3), (-1, 0), (3, 0)])
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 2), (torch.float16, 6)])
def test_attention_stays_inside_documents_and_windows(heads, dtype, window):
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = [5, 1, 0, 17, 9]
    query, key, value = (
        torch.randn(sum(lengths), count, 32, generator=generator, device="cuda", dtype=dtype) for count in (heads, 2, 2)
    )
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda", dtype=torch.int32)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    distance = torch.arange(sum(lengths), device="cuda")
    distance = distance[:, None] - distance[None]
    seen = document[:, None] == document[None]
    left, right = window
    seen &= (distance <= left) if left >= 0 else True
    seen &= (-distance <= right) if right >= 0 else True

    inputs = [states.clone().requires_grad_() for states in (query, key, value)]
    exact = [states.detach().double().requires_grad_() for states in inputs]
    expected = F.scaled_dot_product_attention(
        *(states.transpose(0, 1) for states in exact), attn_mask=seen, enable_gqa=True
    ).transpose(0, 1)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    output = variable_length_attention(*inputs, cu_seqlens, 20, scale=None, window=window, dropout=0.0)
    output.backward(upstream.to(dtype))
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=2e-2)
    for ours, theirs in zip(inputs, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=5e-2, rtol=5e-2)


def _leave_nan_behind(like: torch.Tensor) -> None:
    """What a kernel does not write of the tensors that are made next shows."""
    _ = [torch.full_like(like, float("nan")) for _ in range(20)]


@pytest.mark.parametrize("window", [(-1, -1), (20, 20)])
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 2), (torch.float16, 6)])
def test_attention_to_fewer_rows_than_attend(heads, dtype, window):
    """As of queries: behind each text come rows of a text of which no row attends, and nobody to them."""
    generator = torch.Generator("cuda").manual_seed(0)
    lengths, attended = torch.tensor([5, 1, 0, 300, 17, 9]), torch.tensor([3, 1, 0, 300, 4, 9])
    ends = lengths.cumsum(0)
    rows = F.pad(ends.repeat_interleave(2), (1, 0)).int().cuda()
    keys = F.pad(torch.stack([ends - lengths + attended, ends], dim=1).flatten(), (1, 0)).int().cuda()
    inputs = [
        torch.randn(int(ends[-1]), count, 64, generator=generator, device="cuda", dtype=dtype)
        for count in (heads, 2, 2)
    ]
    text = torch.repeat_interleave(torch.arange(len(lengths)), lengths).cuda()
    place = torch.arange(len(text)).cuda() - (ends - lengths).cuda()[text]
    seen = (text[:, None] == text) & (place < attended.cuda()[text])
    if window[0] >= 0:
        # The long text is seen in part, the others whole.
        seen &= (place[:, None] - place).abs() <= window[0]
    exact = [states.double().requires_grad_() for states in inputs]
    expected = F.scaled_dot_product_attention(
        *(states.transpose(0, 1) for states in exact), attn_mask=seen, enable_gqa=True
    )
    upstream = torch.randn(len(text), heads, 64, generator=generator, device="cuda").to(dtype)
    expected.backward(upstream.double().transpose(0, 1))
    for _ in range(3):
        for states in inputs[:2]:
            _leave_nan_behind(states)
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


@pytest.mark.parametrize("family", ["modernbert", "bert", "xlm-roberta", "minilm", "qwen3"])
def test_packed_equals_padded(small, family, caplog):
    model = small(family)
    pylate_fastmaxsim.enable()
    batch = batch_of(model)
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"), torch.autocast("cuda", torch.bfloat16):
        documents = encoding_encode.encode(model, encoding_encode.plan_documents(model, batch[1:], model.skiplist))
        padded = torch.cat([model(dict(column))["token_embeddings"] for column in batch[1:]])
    assert not [record for record in caplog.records if "not packed" in record.message]
    mask = torch.cat([column["attention_mask"] for column in batch[1:]]).bool()
    assert documents.values.shape == padded[mask].shape
    difference = F.normalize(documents.values.float(), dim=-1) - F.normalize(padded[mask].float(), dim=-1)
    assert difference.norm(dim=-1).max() < 0.05


@pytest.mark.parametrize(
    "loss_class, options", [(losses.Contrastive, {}), (losses.CachedContrastive, {"mini_batch_size": 5})]
)
@pytest.mark.parametrize("family", ["modernbert", "wide modernbert", "bert", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_and_gradients_are_as_exact_as_stock(small, dtype, family, loss_class, options):
    model = small(family)
    batch = batch_of(model)
    expected = stock_losses(model, [batch], loss_class, autocast=dtype, **options)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        ours = losses_of(model, [batch], loss_class, autocast=dtype, **options)
        joint = loss_class is losses.Contrastive and family in ("wide modernbert", "bert")
        assert (set(modes.joined.get(model, {}).values()) == {True}) == joint
    assert_as_exact(ours, expected)


def test_attention_dropout_is_packed_too(small, caplog):
    model = small("bert", attention_probs_dropout_prob=0.1)
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        values, gradients = losses_of(model, [batch_of(model)])
    assert not [record for record in caplog.records if "not packed" in record.message]
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_float32_is_grouped_and_said(small, caplog):
    model = small()
    pylate_fastmaxsim.enable()
    batch = batch_of(model)
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        for _ in range(2):
            losses.Contrastive(model)(batch).backward()
    said = [record.message for record in caplog.records if "not packed" in record.message]
    assert len(said) == 1 and "bf16" in said[0]


def test_collated_documents_are_packed_without_waiting_for_the_device(small):
    model = small()
    pylate_fastmaxsim.enable()
    batch = batch_of(model)
    with torch.autocast("cuda", torch.bfloat16):
        encoding_encode.encode(model, encoding_encode.plan_documents(model, batch[1:], model.skiplist))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            documents = encoding_encode.encode(model, encoding_encode.plan_documents(model, batch[1:], model.skiplist))
            documents.values.float().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


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
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["modernbert", "wide modernbert"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(small, reentrant, family):
    model = small(family)
    batch = batch_of(model)
    expected = stock_losses(model, [batch])
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model[0].auto_model.enable_input_require_grads()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        ours = losses_of(model, [batch])
    assert_as_exact(ours, expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["modernbert", "wide modernbert", "bert", "qwen3"])
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


def test_model_compiled_by_its_user(small):
    model = small("wide modernbert")
    # Many, so that no few similarities that bf16 makes equal decide.
    batch = batch_of(model, count=64)
    expected = stock_losses(model, [batch])
    torch._dynamo.reset()
    with pylate_fastmaxsim.enabled(stock_masking=True):
        ours = losses_of(torch.compile(model), [batch_of(model, count=64)])
    ours = ours[0], {name.removeprefix("_orig_mod."): gradient for name, gradient in ours[1].items()}
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
        with pytest.raises(ValueError, match="changed after PyLate's collator"):
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
