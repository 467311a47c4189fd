"""What tests of comparisons read and make: reports, and the steps of a run."""

import base64
from html.parser import HTMLParser
from unittest.mock import patch
from xml.etree import ElementTree

from pylate_fastmaxsim.comparison.gate import Gate
from pylate_fastmaxsim.comparison.turns import Run, Turns


class Page(HTMLParser):
    """A report as a browser without a network sees it; anything that it would have to fetch fails."""

    def __init__(self, html: str):
        super().__init__()
        self.titles, self.images, self.text, self._tag = [], [], "", ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self._tag = tag
        attributes = dict(attributes)
        assert tag not in ("script", "link", "iframe", "object") and "href" not in attributes
        if "src" in attributes:
            kind, _, data = attributes["src"].partition(";base64,")
            assert kind == "data:image/svg+xml" and attributes["alt"]
            self.images.append(ElementTree.fromstring(base64.b64decode(data)))

    def handle_data(self, data):
        assert "url(" not in data and "@import" not in data
        self.text += data
        if self._tag == "h2" and data.strip():
            self.titles.append(data)


def steps(seconds: list[float], encoded: int) -> list[dict]:
    return [
        {"loss": 1 / (place + 1), "seconds": s, "documents": 4, "live": 30, "query_tokens": 20, "encoded": encoded}
        for place, s in enumerate(seconds)
    ]


def run_of(steps: list[dict], **more) -> Run:
    """A run whose steps are a block each, none of which stood beside another."""
    blocks = [{"seconds": step["seconds"], "cpu_seconds": 0.0, "steps": 1, "pair": None} for step in steps]
    return Run(steps=steps, blocks=blocks, **more)


def run_of_blocks(*seconds: float, cpu: float = 2.0, device: str = "cpu", steps: int = 3) -> Run:
    """A run with a block of each length, behind a warm-up that took long; ``cpu`` is of its CPU seconds to its seconds."""
    blocks = [{"seconds": 99.0, "cpu_seconds": 99.0, "steps": 5, "pair": None}]
    blocks += [{"seconds": s, "cpu_seconds": cpu * s, "steps": steps, "pair": pair} for pair, s in enumerate(seconds)]
    taken = [{"loss": 1.0}] * sum(block["steps"] for block in blocks)
    return Run(steps=taken, blocks=blocks, device=device, memory={"before": 1, "peak": 2**20}, wall_seconds=9.0)


class RecordingGate:
    """Stands for a gate in a process without turns: ``steps`` are those that went through, a second each."""

    def __init__(self):
        self.steps = []

    before_step = steps_done = lambda self: None

    def after_step(self, **measured):
        self.steps.append({"seconds": 1.0, **{name: float(value) for name, value in measured.items()}})

    def finished(self, **result):
        self.result = result


def take_turns_here(children: dict, rounds: int) -> Turns:
    """Stands for the turns of processes, whose code is run in this one: a child's command is its code."""
    runs = {}
    for name, child in children.items():
        gate = RecordingGate()
        with patch.object(Gate, "from_environment", lambda gate=gate: gate):
            exec(child.command)
        runs[name] = run_of(gate.steps, memory={"before": 1, "peak": 2}, result=gate.result)
    return Turns(runs, restarted=False)
