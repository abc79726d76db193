"""Pipeline parallelism: how modules and batches are split, schedules, the engine, and messages between stages."""
