"""The kernels, one family a file."""
