"""What ``lightning-hybrid demo`` trains: a module and data as users write them."""
