"""Command-line tools around the kernels, each `python -m tuning.NAME`, and what they share."""
