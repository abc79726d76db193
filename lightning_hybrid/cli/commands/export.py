"""``lightning-hybrid export``: export of a checkpoint's weights to a Hugging Face folder.

`cli.main` calls :func:`run`; the export is in `cli.export`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hybrid.cli.parser import Parser, on_disk

if TYPE_CHECKING:
    from lightning_hybrid.cli.export import Export

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def run(args: Sequence[str]) -> None:
    """Export the weights of a checkpoint to a Hugging Face folder, and print the names of its files.

    Args:
        args: The words of the command line after ``export``.

    Raises:
        SystemExit: With 2 if the options are wrong, the checkpoint cannot be read, or the folder cannot be written.
    """
    parser = Parser(
        "export",
        description="Export the weights of a checkpoint to a new folder, in safetensors format. You can load them with"
        " `from_pretrained` or `safetensors.torch.load_file`. The checkpoint can be larger than RAM.",
        epilog="The command unpickles the checkpoint. This can run code, so use only checkpoints that you trust.",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="path or URL (such as s3://...) of a checkpoint file or directory"
    )
    parser.add_argument("folder", type=on_disk, metavar="FOLDER", help="output folder, which must be new or empty")
    parser.add_argument(
        "--prefix",
        metavar="NAME",
        help="export only tensors whose names start with this prefix, such as `model.`, and remove the prefix from the"
        " names; '' exports all tensors under their full names (default: the first part of the names, if it is the same"
        " in all names)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_parse_bytes,
        default=5 * 10**9,
        metavar="SIZE",
        help="maximum size of each file, such as 500MB (default: 5GB)",
    )
    parser.add_choice("--dtype", _DTYPES, help="convert floating-point tensors to this dtype (default: unchanged)")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help="path of the model's config.json or of its folder (default: the configuration in the checkpoint, if any)",
    )
    options = parser.parse_args(args)

    import torch

    from lightning_hybrid.checkpoint.storage.remote import place_of
    from lightning_hybrid.cli.export import export
    from lightning_hybrid.cli.progress import byte_progress

    with parser.refusing(OSError, ValueError), byte_progress(options.folder.name) as progress:
        result = export(
            place_of(options.checkpoint),
            options.folder,
            prefix=options.prefix,
            max_shard_size=options.max_shard_size,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            config=options.config,
            progress=progress,
        )
    size = sum((options.folder / file).stat().st_size for file in result.files)
    print(f"{options.folder}: {', '.join(result.files)}; {size:,} bytes\n{_text(result)}")


def _text(result: Export) -> str:
    """Return notes about the export that the files do not show."""
    from lightning_hybrid.distributed.module_names import fold_numbered

    lines = [f"{name} is tied to {stored} and stored only once" for name, stored in result.tied.items()]
    if result.prefix:
        lines.insert(0, f"removed the prefix {result.prefix!r} from the names")
    elif len(result.first_parts) > 1:
        parts = ", ".join(f"{first!r} ({count})" for first, count in result.first_parts.items())
        lines.insert(0, f"kept the full names, which start with {parts}; to export only one part, use --prefix")
    if result.left_out:
        lines.append(
            f"not exported: {', '.join(name for (name,) in fold_numbered((name,) for name in result.left_out))}"
        )
    if not result.has_config:
        lines.append(
            "no config.json was written, because the checkpoint does not contain the model configuration;"
            " `from_pretrained` needs this file, so pass the original model's config.json with --config, or call"
            " `model.config.save_pretrained(FOLDER)`"
        )
    return "\n".join(lines)


def _parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``5GB``, ``500MB`` or ``2GiB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    number = (
        0
        if match is None
        else float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper())
    )
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes, such as 5GB, 500MB or 2GiB")
    return int(number)
