"""Steps of PyLate's losses: every option of them, and the metrics that are accelerated."""

from pylate import losses
from pylate.scores import ColBERTScores, XTRKDScores, XTRScores

from pylate_fastmaxsim import PooledScores
from pylate_fastmaxsim.integrations.models.wrappers import unwrap
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from tests.support import rank_steps
from tests.support.compared import batch_for
from tests.support.hosts import Host, Step, operators
from tests.support.models import load_model

CONTRASTIVE = [{"size_average": False}, {"temperature": 0.05, "gather_across_devices": True}]
OPTIONS = {
    losses.Contrastive: [{}, *CONTRASTIVE, {"score_mini_batch_size": 4}, {"score_mini_batch_size": 100}],
    losses.CachedContrastive: [
        {"mini_batch_size": 3, "score_mini_batch_size": 2},
        *CONTRASTIVE,
        {"mini_batch_size": 1, "show_progress_bar": True, "size_average": False},
    ],
    losses.Distillation: [{}, {"size_average": False}, {"normalize_scores": False}],
}
NAMES = {losses.Contrastive: "contrastive", losses.CachedContrastive: "cached", losses.Distillation: "distillation"}


class OtherScores(ColBERTScores):
    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


def step_of(loss_class, metric=None, **options):
    """``metric``: how many document tokens pass, with XTR scores. These are float32, whatever the model computes in."""

    def build(model) -> Step:
        scores = {} if metric is None else {"score_metric": metric_of(loss_class, metric)}
        batch = batch_for(loss_class, unwrap(model))
        return Step(loss_class(model, **scores, **options), *batch, 1e-10 if metric is None else 1e-5)

    return build


def metric_of(loss_class, k: int):
    return (XTRKDScores if loss_class is losses.Distillation else XTRScores)(k)


LOSSES = {
    " ".join(
        [NAMES[loss_class], *(f"{name}={value}" for name, value in options.items())][: 1 if place == 0 else None]
    ): (step_of(loss_class, **options))
    for loss_class, each in OPTIONS.items()
    for place, options in enumerate(each)
}
LOSSES |= {
    f"{NAMES[loss_class]} by XTR {k} {options or ''}".rstrip(): step_of(loss_class, k, **options)
    for loss_class, each in OPTIONS.items()
    for k, options in ((4, {}), *((30, options) for options in each[1:3]), (60, each[0]))
}


def step_of_rank(model, wrapped, name: str, rank: int, **options) -> Step:
    loss_class = next(loss_class for loss_class, each in NAMES.items() if each == name)
    # Scores by these are float32.
    tolerance = 1e-5 if "score_metric" in options else 1e-10
    return Step(loss_class(wrapped, **options), rank_steps.batch_of(model, rank), tolerance=tolerance)


HOST = Host(
    load=lambda path, **options: load_model(path, **options).double(),
    losses=LOSSES,
    step_of_rank=step_of_rank,
    transformer=lambda model: model[0],
    decided_by=lambda model: model,
    families={"modernbert": None},
    watch=operators((pylate_losses, "maxsim"), (pylate_losses, "xtr_scores"), (PooledScores, "of_batches")),
    options={"stock_masking": True},
    metric="score_metric",
)
