"""The Vision Transformer of ``lightning-hybrid demo`` as a script, to train it under any layout.

From the root of the repository, run the example in one process or with any configuration::

    python examples/vit.py fit --trainer.max_epochs 20
    python examples/vit.py fit --config configs/vit_pipeline.yaml
"""

from __future__ import annotations

from lightning_hybrid.cli.demo.vit import Attention, Block, DropPath, Embedding, ViT

__all__ = ["Attention", "Block", "DropPath", "Embedding", "ViT"]


if __name__ == "__main__":
    from lightning_hybrid.cli.main import main

    main(model="examples.vit.ViT", data="examples.data.Digits")
