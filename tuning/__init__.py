"""Command-line tools around the kernels: `python -m tuning.ladder`, `python -m tuning.occupancy`, and what they share."""
