"""What Lightning's Trainer meets: training and evaluation steps, loaders, precision, results."""
