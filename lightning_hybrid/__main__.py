"""``python -m lightning_hybrid`` is the program ``lightning-hybrid``."""

from lightning_hybrid.cli.main import main

if __name__ == "__main__":
    main()
