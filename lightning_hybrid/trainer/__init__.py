"""The parts of the strategy that the Trainer calls: training and evaluation steps, data loaders, precision, results."""
