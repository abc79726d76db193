"""``lightning-hybrid inspect``: the content of a checkpoint.

`cli.main` calls :func:`run`; the content is from `cli.inspect`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.cli.parser import Parser, print_json, print_text


def run(args: Sequence[str]) -> None:
    """Print the content of a checkpoint, as text or as JSON.

    Args:
        args: The words of the command line after ``inspect``.

    Raises:
        SystemExit: With 2 if the options are wrong, or the checkpoint cannot be read.
    """
    parser = Parser(
        "inspect",
        description="Show the contents of a checkpoint: tensors, optimizers and the layout of the run. The values"
        " of tensors are not read. Similar layers are combined into one line.",
        epilog="The command does not run code from the checkpoint. For objects other than tensors and plain"
        " containers, the command shows only the class.",
    )
    parser.add_argument("path", metavar="PATH", help="path or URL (such as s3://...) of a checkpoint file or directory")
    parser.add_argument("--every-name", action="store_true", help="print a separate line for each tensor")
    parser.add_json()
    options = parser.parse_args(args)

    from lightning_hybrid.checkpoint.storage.remote import place_of
    from lightning_hybrid.cli.inspect import inspect_checkpoint

    with parser.refusing(OSError, ValueError):
        inspection = inspect_checkpoint(place_of(options.path))
        if options.json:
            print_json(inspection.as_dict())
        else:
            print_text(inspection.text(every_name=options.every_name))
