"""``fastmaxsim robustness``: a trained model on longer documents and on documents with injected tokens."""

import argparse

from pylate_fastmaxsim.cli.terminal import (
    add_collection,
    add_overrides,
    at_least,
    from_arguments,
    plain,
    quiet_libraries,
    report_interruption,
    several,
)


def add_robustness_arguments(parser: argparse.ArgumentParser) -> None:
    from pylate_fastmaxsim.integrations.options import pooling_from_text

    add = parser.add_argument
    add(
        "target",
        metavar="RECIPE_OR_MODEL",
        help="a recipe (.yaml, or a name of fastmaxsim recipes) whose model is trained, or a model of texts: its folder or its "
        "name on the Hub",
    )
    add_overrides(parser)
    add_collection(parser, ", in place of the recipe's held-out data; a model needs one")
    add(
        "--pooling",
        dest="poolings",
        type=pooling_from_text,
        action="append",
        default=[],
        metavar="POOLING",
        help="max, top_k=K, softmax=T or log_sum_exp=T; may be given several times, in place of the first four",
    )
    add(
        "--times",
        type=several(at_least(1)),
        default="1,2,4,8",
        metavar="N,N,...",
        help="how many times as long documents become (%(default)s)",
    )
    add(
        "--tokens",
        type=several(at_least(0)),
        default="0,25,50,100,200,400",
        metavar="K,K,...",
        help="how many tokens are injected (%(default)s)",
    )
    add(
        "--append",
        choices=["auto", "text", "tokens"],
        default="auto",
        metavar="APPEND",
        help="what makes documents longer: text, tokens (embeddings), or auto for what the model can (%(default)s)",
    )
    add(
        "--noise",
        type=at_least(0, float),
        default=0.5,
        help="how far injected tokens are from those of the query (%(default)s)",
    )
    add("--max-queries", type=at_least(1), default=300, help="of more queries some are drawn (%(default)s)")
    add(
        "--max-documents",
        type=at_least(1),
        default=2000,
        help="of more documents some are drawn beside gold ones (%(default)s)",
    )
    add("--seed", type=at_least(0), default=0, help="of all draws (%(default)s)")
    add("--output", metavar="DIR", help="folder for the results: the recipe's output_dir, or here for a model")


def run_robustness(options: argparse.Namespace) -> None:
    from pylate_fastmaxsim.recipes.robustness.measure import robustness
    from pylate_fastmaxsim.recipes.robustness.report import tables, write_robustness_page, write_robustness_png
    from pylate_fastmaxsim.recipes.robustness.task import Settings

    quiet_libraries()
    with report_interruption(lambda: "the same command starts again"):
        result, pairs, file = robustness(
            options.target,
            from_arguments(Settings, options),
            options.overrides,
            options.beir,
            options.split,
            options.output,
        )
        for table in tables(result):
            plain.print(table)
        write_robustness_png(result, file.with_suffix(".png"))
        write_robustness_page(result, pairs, file.with_suffix(".html"))
    print(*(file.with_suffix(suffix) for suffix in (".json", ".png", ".html")), sep="\n")
