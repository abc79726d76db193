"""``lightning-hybrid export``: the weights of a checkpoint as Hugging Face writes them."""

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
    """Write the weights of a checkpoint as Hugging Face does."""
    parser = Parser(
        "export",
        description="Write the weights of a checkpoint, a file or a directory, into a new folder as model.safetensors,"
        " which `from_pretrained` and `safetensors.torch.load_file` open. It may be larger than the memory.",
        epilog="It unpickles what it reads: only use checkpoints that you trust.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the checkpoint: a path, or a URL such as s3://...")
    parser.add_argument("folder", type=on_disk, metavar="FOLDER", help="the folder to write, new or empty")
    parser.add_argument(
        "--prefix",
        metavar="NAME",
        help="the attribute of the module that holds the model, such as `model.`; names lose it, and others are left"
        " out; found where all names begin with it; '' for names as they are",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_parse_bytes,
        default=5 * 10**9,
        metavar="SIZE",
        help="the most bytes in a file, such as 500MB; 5GB by default",
    )
    parser.add_choice("--dtype", _DTYPES, help="convert floating-point tensors")
    parser.add_argument("--config", type=Path, metavar="PATH", help="the model's config.json, or the folder of one")
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
    """What is not to be seen in the files."""
    from lightning_hybrid.distributed.module_names import fold_numbered

    lines = [f"{name} is tied to {stored}, and stored once" for name, stored in result.tied.items()]
    if result.prefix:
        lines.insert(0, f"names without {result.prefix!r}")
    elif len(result.first_parts) > 1:
        parts = ", ".join(f"{first!r} ({count})" for first, count in result.first_parts.items())
        lines.insert(0, f"names as they are, beginning with {parts}; to write one part without its prefix: --prefix")
    if result.left_out:
        lines.append(f"left out: {', '.join(name for (name,) in fold_numbered((name,) for name in result.left_out))}")
    if not result.has_config:
        lines.append(
            "no config.json: the checkpoint does not say how the model is configured. `from_pretrained` needs it: give"
            " --config, the folder or file that the model was made from, or call `model.config.save_pretrained(FOLDER)`"
        )
    return "\n".join(lines)


def _parse_bytes(text: str) -> int:
    """Bytes of a size such as ``5GB``, ``500MB`` or ``2GiB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    number = (
        0
        if match is None
        else float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper())
    )
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes, such as 5GB, 500MB or 2GiB")
    return int(number)
