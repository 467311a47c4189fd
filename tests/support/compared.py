"""A step of a loss, with and without the flag: the loss with its gradients, and whether two are equal."""

import torch

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.models.wrappers import unwrap
from tests.support.models import features, sentences


def batch_of(model, columns: int = 2, queries: int = 6, seed: int = 0, collate=features):
    """Of a ColBERT."""
    texts = [sentences(queries, longest=8, seed=seed)]
    texts += [sentences(queries, seed=seed + 1 + column) for column in range(columns)]
    return collate(model, *texts)


def batch_for(loss_class, model):
    """A batch for this loss of PyLate, and the teacher's scores where it takes them."""
    if loss_class.__name__ != "Distillation":
        return batch_of(model), None
    labels = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    return features(model, sentences(4, longest=8), sentences(12, seed=1)), labels.to(model.dtype)


def value_of(loss_function, batch, labels=None):
    """The loss; of several terms their sum, as the trainer adds them up."""
    value = loss_function([dict(column) for column in batch], None if labels is None else labels.clone())
    return sum(value.values()) if isinstance(value, dict) else value


def found(model, value):
    """A loss that was differentiated, and the gradients that it left at all parameters of the model."""
    weights = unwrap(model).named_parameters()
    return value.detach(), {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}


def run(loss_function, batch, labels=None, bf16: bool = False):
    """The loss and the gradients of all parameters."""
    loss_function.model.zero_grad()
    with torch.autocast(batch[0]["input_ids"].device.type, torch.bfloat16, enabled=bf16):
        value = value_of(loss_function, batch, labels)
    value.backward()
    return found(loss_function.model, value)


def assert_equal(ours, stock, tolerance: float = 1e-10):
    """Equal to ``tolerance`` of the loss, and of the largest gradient."""
    assert abs(ours[0] - stock[0]) <= tolerance * abs(stock[0])
    assert ours[1].keys() == stock[1].keys()
    largest = max(gradient.abs().max() for gradient in stock[1].values())
    assert largest > 0
    for name, gradient in stock[1].items():
        assert (ours[1][name] - gradient).abs().max() <= tolerance * largest, name


def distance(ours, exact) -> float:
    """Of all gradients from exact ones, relative to their length."""
    assert ours[1].keys() == exact[1].keys()
    own, other = (torch.cat([gradient.double().flatten() for gradient in each[1].values()]) for each in (ours, exact))
    return ((own - other).norm() / other.norm()).item()


def assert_as_stock(loss_function, batch, labels=None, times: int = 1, tolerance: float = 1e-10, **options):
    """That switching on changes neither loss nor gradients. It stays on, with these options."""
    stock = run(loss_function, batch, labels)
    pylate_fastmaxsim.enable(**{"stock_masking": True, **options})
    for _ in range(times):
        assert_equal(run(loss_function, batch, labels), stock, tolerance)
