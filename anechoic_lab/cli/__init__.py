"""The commands of the laboratory; `pyproject.toml` registers them in the group `anechoic.commands`."""
