"""Sorting slots of a mixture by expert."""
