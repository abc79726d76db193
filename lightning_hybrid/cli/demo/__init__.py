"""The module and data of ``lightning-hybrid demo``, written as users write them."""
