"""``lightning-hybrid inspect``: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.cli.parser import Parser, print_json, print_text


def run(args: Sequence[str]) -> None:
    """Show what a checkpoint holds."""
    parser = Parser(
        "inspect",
        description="Show what a checkpoint holds: tensors, optimizers, the layout it was written under. No tensor is"
        " read. Layers that are alike share a line.",
        epilog="No code of the checkpoint runs: what is neither a tensor nor a plain container is shown by its class.",
    )
    parser.add_argument(
        "path", metavar="PATH", help="a file, or a directory of shards: a path, or a URL such as s3://..."
    )
    parser.add_argument("--every-name", action="store_true", help="a line for each tensor")
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
