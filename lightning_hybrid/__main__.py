"""Entry point of ``python -m lightning_hybrid``, which is the same program as ``lightning-hybrid``."""

from lightning_hybrid.cli.main import main

if __name__ == "__main__":
    main()
