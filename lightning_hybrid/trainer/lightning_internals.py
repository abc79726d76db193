"""Everything private of Lightning and torchmetrics that this package reads or replaces, and nothing else.

Each function is called after what it does, and says in ``Touches`` which private names it uses and in ``Without`` what
would break if they went. ``tests/test_lightning_contract.py`` tries each one alone, so that an upgrade says within
seconds which of them moved; ``docs/lightning-internals.md`` is made from these docstrings.
"""

from __future__ import annotations

__all__: list[str] = []

# -- loops and their progress ------------------------------------------------------------------------------------------

# -- logged values -----------------------------------------------------------------------------------------------------

# -- data --------------------------------------------------------------------------------------------------------------

# -- optimization and precision ----------------------------------------------------------------------------------------

# -- modules and callbacks ---------------------------------------------------------------------------------------------

# -- torchmetrics ------------------------------------------------------------------------------------------------------

# -- processes ---------------------------------------------------------------------------------------------------------
