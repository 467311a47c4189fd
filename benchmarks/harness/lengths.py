"""Made-up lengths of documents, log-normal as those of MS MARCO passages are."""

import math
import random

MEAN_TOKENS = 80.0
SIGMA = 0.5


def log_normal(mean: float, draw: random.Random) -> int:
    return round(draw.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA))
