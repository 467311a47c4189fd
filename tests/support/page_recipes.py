"""The shipped recipes for images of pages, over tiny models, processors and pages that are made on the spot."""

from importlib.util import find_spec
from pathlib import Path

from tests.support.tiny_recipe import text

# The shipped recipe of each kind, where colpali-engine is installed.
PAGES = {"colqwen2": "colqwen_vidore", "colpali": "colpali_vidore"} if find_spec("colpali_engine") else {}
ROWS = 22


def write_pages(folder: Path) -> Path:
    """A folder laid out as a ViDoRe data set on the Hub: queries, and images in Parquet."""
    from datasets import Dataset, Features, Image, List, Value

    from tests.support.visual_models import page

    rows = {"query": [text(n, 2 + n % 6) for n in range(ROWS)], "image": list(map(page, range(ROWS)))}
    rows |= {"negatives": [[page(n + 50), page(n + 90)] for n in range(ROWS)], "source": ["made"] * ROWS}
    rows["uneven"] = [[page(n)] * (1 + n % 2) for n in range(ROWS)]
    features = {"query": Value("string"), "image": Image(), "source": Value("string")}
    features |= dict.fromkeys(("negatives", "uneven"), List(Image()))
    (folder / "data").mkdir()
    Dataset.from_dict(rows, features=Features(features)).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    return folder


def page_overrides(kind: str, model: str, pages: Path, output: Path) -> list[str]:
    """Overrides under which the shipped recipe of a kind trains for four steps on a CPU."""
    training = {"per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 0.005, "warmup_steps": 0}
    training |= {"save_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": "true"}
    training["dataloader_num_workers"] = 0
    settings = [f"output_dir={output}", f"model.name_or_path={model}", "model.lora.r=4", f"data.name={pages}"]
    settings += [f"training.{key}={value}" for key, value in training.items()] + ["evaluation.rows=6"]
    return [*settings, "model.max_visual_tokens=9"] if kind == "colqwen2" else settings
