"""Small batches as CUDA graphs: what is filled up, when graphs are used, and that losses and gradients are stock's.

On a CPU a stand-in repeats the recorded calls; test_encode_cuda.py records real ones.
"""

import pytest
import torch
from pylate import losses
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import graphs
from pylate_fastmaxsim.integrations.models.encoders import encoder_of
from tests.support.compared import assert_as_stock, assert_equal, batch_of, found, run
from tests.support.models import load_model

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("packed", "traced")]


@pytest.fixture
def recorded(monkeypatch) -> list[str]:
    """What was recorded and replayed, with graphs that run their functions again."""
    done, waiting = [], []  # one memory for all

    def record(forward, weights, gradients, pool, stream):
        done.append("record")
        states = forward().detach()
        gradient = torch.zeros_like(states)

        @torch.enable_grad()
        def replay_forward():
            done.append("forward")
            waiting[:] = [forward()]
            states.copy_(waiting[0].detach())

        @torch.enable_grad()
        def replay_backward():
            done.append("backward")
            found = torch.autograd.grad(waiting.pop(), weights, gradient, allow_unused=True)
            for to, part in zip(gradients, found, strict=True):
                if part is not None:
                    to.copy_(part)

        used = [part is not None for part in torch.autograd.grad(forward().sum(), weights, allow_unused=True)]
        return graphs.Replays(replay_forward, replay_backward, states, gradient, used)

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "can_record", lambda device: True)
    return done


@pytest.fixture
def model(encoder):
    # Its layers are compiled fastest.
    return load_model(encoder("bert", num_hidden_layers=1)).double()


@pytest.mark.parametrize("family", ["modernbert", "bert"])
def test_batches_of_changing_sizes(encoder, family, recorded):
    # Local layers see all of a query, so that queries are encoded with the documents.
    changes = {"local_attention": 64} if family == "modernbert" else {}
    model = load_model(encoder(family, **changes)).double()
    batches = [batch_of(model, queries=queries, seed=seed) for seed, queries in enumerate((6, 5, 6, 3, 6, 5))]
    loss_function = losses.Contrastive(model)
    expected = [run(loss_function, batch) for batch in batches]
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for _ in range(2):
            for batch, stock in zip(batches, expected, strict=True):
                assert_equal(run(loss_function, batch), stock)
    assert recorded.count("record") < recorded.count("forward") == recorded.count("backward")
    assert encoder_of(model)._compiled_call_impl is None


@pytest.mark.parametrize("together", [False, True])
def test_gradients_of_two_batches_accumulate(model, recorded, together):
    """After each, or after both have run forwards."""
    batches, loss_function = [batch_of(model, seed=seed) for seed in range(2)], losses.Contrastive(model)

    def step():
        model.zero_grad()
        values = []
        for batch in batches:
            values.append(loss_function([dict(column) for column in batch], None))
            if not together:
                values[-1].backward()
        if together:
            sum(values).backward()
        return found(model, sum(values))

    expected = step()
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for _ in range(3):
            assert_equal(step(), expected)
    assert "forward" in recorded


def test_changes_of_the_encoder(model, recorded):
    batch, loss_function = batch_of(model), losses.Contrastive(model)
    bias = next(weight for weight in encoder_of(model).parameters() if weight.requires_grad)

    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for _ in range(3):
            run(loss_function, batch)
        assert recorded.pop() == "backward"
        inner = next(module for module in encoder_of(model).modules() if isinstance(module, nn.Embedding))
        for change, back in (
            (lambda: bias.requires_grad_(False), lambda: bias.requires_grad_(True)),
            (lambda: inner.register_forward_hook(lambda _, args, output: output / 2), inner._forward_hooks.clear),
        ):
            change()
            ours = [run(loss_function, batch) for _ in range(3)]
            pylate_fastmaxsim.disable()
            stock = run(loss_function, batch)
            pylate_fastmaxsim.enable(compile=True, stock_masking=True)
            for each in ours:
                assert_equal(each, stock)
            back()


def test_one_backward_for_each_forward(model, recorded):
    batch, loss_function = batch_of(model), losses.Contrastive(model)
    with pylate_fastmaxsim.enabled(compile=True):
        for _ in range(2):
            run(loss_function, batch)
        loss = loss_function([dict(column) for column in batch], None)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="has one backward"):
            loss.backward()


def test_backward_after_the_flag_is_off(model, recorded):
    batch, loss_function = batch_of(model), losses.Contrastive(model)
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        expected = [run(loss_function, batch) for _ in range(3)][-1]
        model.zero_grad()
        loss = loss_function([dict(column) for column in batch], None)
    loss.backward()
    assert_equal(found(model, loss), expected)


def test_what_cannot_be_recorded_runs_as_before(model, monkeypatch, caplog):
    def record(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "can_record", lambda device: True)
    assert_as_stock(losses.Contrastive(model), batch_of(model), times=3, compile=True)
    assert caplog.text.count("CUDA graphs, so that the GPU waits for the host: CUDA out of memory.") == 1


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradient_checkpointing(encoder, recorded, caplog, dropout):
    model = load_model(encoder("bert", hidden_dropout_prob=dropout)).double().train()
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    batch, loss_function = batch_of(model), losses.Contrastive(model)
    expected = run(loss_function, batch)
    with pylate_fastmaxsim.enabled(compile=True, stock_masking=True):
        for _ in range(3):
            ours = run(loss_function, batch)
    if dropout:
        assert "gradient checkpointing repeats the random numbers of dropout" in caplog.text and not recorded
    else:
        assert_equal(ours, expected)
        assert "forward" in recorded


def test_gradcache_keeps_to_the_encoder(model, recorded):
    batch, loss_function = batch_of(model), losses.CachedContrastive(model, mini_batch_size=3)
    with pylate_fastmaxsim.enabled(compile=True):
        for _ in range(3):
            run(loss_function, batch)
    assert not recorded
