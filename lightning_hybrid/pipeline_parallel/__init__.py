"""A module cut into stages: schedules as data, the engine that runs them, and messages between stages."""
