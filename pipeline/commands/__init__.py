"""Command groups of `pipeline.cli` that are too large to stand in it."""
