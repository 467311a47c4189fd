"""The losses that score in other ways than Contrastive train with the pooling of the recipe, and alike with the plugin on and off."""

import pytest

from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.tiny_recipe import hub_dataset, kd_subsets, tiny, write


@pytest.mark.parametrize("loss", ["cached_contrastive", "distillation"])
def test_losses_are_those_of_the_pooling_with_and_without_the_plugin(loss, tmp_path):
    values = tiny(tmp_path, loss={"name": loss}, training={"max_steps": 2, "save_steps": None}, evaluation={"rows": 0})
    values["model"]["build"]["dropout"] = 0.0
    if loss == "distillation":
        hub = hub_dataset(tmp_path / "kd", **kd_subsets())
        values["data"] = {"source": "distillation", "name": str(hub)}
    file = write(tmp_path, values)

    def losses(*overrides) -> list[float]:
        return [value for _, value in train(load_recipe(file, overrides), resume=False)["losses"]]

    maximum, stock = losses(), losses("loss.pooling.top_k=3")
    fast = losses("loss.pooling.top_k=3", "fast.enabled=true")
    assert fast == pytest.approx(stock, rel=1e-5) and stock != pytest.approx(maximum, rel=1e-3)
