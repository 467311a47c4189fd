"""Losses with other poolings than the maximum, by the flag and by a metric, against plain PyTorch."""

import pytest

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, PooledScores, Softmax, TopK
from tests.support.compared import assert_equal
from tests.support.hosts import COMMON, each_host
from tests.support.pooled_definitions import PlainScores

NAMES = "PyLate", "MultiVectorEncoder"
# And whether each query has documents of its own.
LOSSES = [param for loss in COMMON for param in each_host(NAMES, loss, loss == "distillation")]
LOSSES += each_host(NAMES[1:], "margins", True)


def run(host, model, loss: str, metric: object = None) -> tuple:
    step = host.losses[loss](model)
    if metric is not None:
        setattr(step.loss, host.metric, metric)
    return step.run()


@pytest.mark.parametrize("pooling", [Max(), TopK(3), Softmax(0.1), LogSumExp(0.1)], ids=str)
@pytest.mark.parametrize("host, loss, own", LOSSES)
def test_losses(encoder, packed, caplog, host, loss, own, pooling):
    """With the metric, stock and without padding, and with the flag; queries have lengths of their own."""
    model = host.model(encoder, num_hidden_layers=1)
    model.do_query_expansion = False  # of PyLate
    metric = PooledScores(pooling, length_normalize=True, own_documents=own)
    plain = run(host, model, loss, PlainScores(metric))
    assert_equal(run(host, model, loss, metric), plain, 3e-6)
    with pylate_fastmaxsim.enabled(**host.options):
        assert_equal(run(host, model, loss, metric), plain, 3e-6)
        assert host.modes(model) == {"packed"}
    assert "(running " not in caplog.text
    if pooling == Max():
        return
    plain = run(host, model, loss, PlainScores(PooledScores(pooling, own_documents=own)))
    with pylate_fastmaxsim.enabled(pooling=pooling):
        assert_equal(run(host, model, loss), plain, 3e-6)
        # What is said with a metric counts more than what is said for all.
        metric = PooledScores(Max(), own_documents=own)
        ours = run(host, model, loss, metric)
    assert_equal(ours, run(host, model, loss, PlainScores(metric)), 3e-6)


@pytest.mark.parametrize("host, loss, own", LOSSES)
def test_a_metric_of_other_documents_than_the_loss_scores_is_an_error(encoder, host, loss, own):
    host.enable()
    with pytest.raises(ValueError, match=rf"^\w+:? .* own_documents={own}.*, got PooledScores"):
        run(host, host.model(encoder), loss, PooledScores(TopK(4), own_documents=not own))


@pytest.mark.parametrize("host", each_host(NAMES))
def test_xtr_scores_stay_as_they_are(encoder, caplog, host):
    model, loss = host.model(encoder), next(name for name in host.losses if "XTR" in name)
    with pylate_fastmaxsim.enabled():
        expected = run(host, model, loss)
    pylate_fastmaxsim.enable(pooling=TopK(4))
    for _ in range(2):
        assert_equal(run(host, model, loss), expected, 1e-5)
    assert caplog.text.count("has no effect with XTR scores") == 1
