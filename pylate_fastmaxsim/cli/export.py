"""``fastmaxsim export``: the documents of an index or a corpus, written for another system."""

import argparse
import errno
import os

from pylate_fastmaxsim.cli.terminal import end_with, path, progress_of_tasks, report_interruption


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    from pylate_fastmaxsim.export.run import TARGETS

    add = parser.add_argument
    add(
        "folder",
        type=path,
        metavar="FOLDER",
        help="of a SparseIndex, of write_corpus, of indexes.Exact, or of fastmaxsim search --index",
    )
    add("--to", choices=TARGETS, required=True, help="what the documents are written as")
    add(
        "--at",
        type=os.path.expanduser,
        required=True,
        metavar="PLACE",
        help="a folder, or for qdrant URL/COLLECTION (key: QDRANT_API_KEY) or FOLDER/COLLECTION: new, or to go on with",
    )


def run_export(options: argparse.Namespace) -> None:
    from pylate_fastmaxsim.export.run import export

    with report_interruption(lambda: "what is written stays, and the same command goes on from there"):
        try:
            with progress_of_tasks() as begin:
                count = export(options.folder, options.to, options.at, begin)
        except (ValueError, ImportError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            end_with(f"fastmaxsim: {error}")
    print(f"{options.at}: {count:,} documents")
