"""``fastmaxsim check``: whether an index, a corpus or a static model is as it was written."""

import argparse
import sys

from pylate_fastmaxsim.cli.terminal import end_with, path


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=path, metavar="FOLDER", help="what to check, with the folders in it")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="cut damaged documents off, with all that come after them; the command that wrote them goes on from there",
    )


def run_check(options: argparse.Namespace) -> None:
    """Print a line for each folder. Ends with code 1 if something is damaged."""
    from pylate_fastmaxsim.retrieval.soundness import check_folder

    try:
        found = check_folder(options.folder, repair=options.repair)
    except (ValueError, OSError) as error:
        end_with(f"fastmaxsim: {error}")
    for each in found:
        documents = "" if each.documents is None else f" of {each.documents:,} documents"
        state = "all is well" if each.damage is None else "repaired" if each.repaired else "damaged"
        print(f"{each.folder}: {each.what}{documents}; {state}{f': {each.damage}' if each.damage else ''}")
    if any(each.damage and not each.repaired for each in found):
        sys.exit(1)
