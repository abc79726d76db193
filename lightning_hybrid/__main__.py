"""``python -m lightning_hybrid`` is the program ``lightning-hybrid``."""

from lightning_hybrid.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
