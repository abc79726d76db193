"""The step program: how the ranks of a model group divide the user's step, chosen once per run."""
