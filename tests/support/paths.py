"""Where the project's files lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
SUPPORT = ROOT / "tests" / "support"
CRANFIELD = ROOT.parent / "shared" / "data" / "cranfield"
