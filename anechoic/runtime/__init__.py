"""The run on its machine: its directory, checkpoints, processes, signals and progress."""
