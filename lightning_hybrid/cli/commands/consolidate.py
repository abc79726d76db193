"""``lightning-hybrid consolidate``: the options of the conversion of a sharded checkpoint to one file.

`cli.main` calls :func:`run`; the conversion is in `cli.consolidate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.cli.parser import Parser, on_disk


def run(args: Sequence[str]) -> None:
    """Convert a sharded checkpoint, which is a directory, to one file, and print its size.

    Args:
        args: The words of the command line after ``consolidate``.

    Raises:
        SystemExit: With 2 if the options are wrong, the checkpoint cannot be read, or the file cannot be written.
    """
    parser = Parser(
        "consolidate",
        description="Convert a checkpoint directory to an ordinary Lightning checkpoint in one file. The checkpoint can"
        " be larger than RAM. Checkpoints of Lightning's FSDPStrategy and ModelParallelStrategy are also supported.",
        epilog="The command unpickles the checkpoint. This can run code, so use only checkpoints that you trust.",
    )
    parser.add_argument("directory", metavar="DIR", help="path or URL (such as s3://...) of the checkpoint directory")
    parser.add_argument("file", type=on_disk, metavar="FILE", help="output file")
    parser.add_argument(
        "--weights-only", action="store_true", help="omit the states of optimizers, schedulers and callbacks"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    options = parser.parse_args(args)

    # These modules import torch, which `--help` and wrong options do not need.
    from lightning_hybrid.checkpoint.storage.remote import place_of
    from lightning_hybrid.cli.consolidate import consolidate
    from lightning_hybrid.cli.progress import byte_progress

    with parser.refusing(OSError, ValueError), byte_progress(options.file.name) as progress:
        consolidate(
            place_of(options.directory),
            options.file,
            weights_only=options.weights_only,
            overwrite=options.overwrite,
            progress=progress,
        )
    print(f"{options.file}: {options.file.stat().st_size:,} bytes")
