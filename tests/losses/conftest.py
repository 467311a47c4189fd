from importlib import import_module

try:
    import_module("pylate")
except ImportError:  # Sentence Transformers 6 excludes it
    collect_ignore_glob = ["test_pylate_*.py", "test_colpali_*.py"]
