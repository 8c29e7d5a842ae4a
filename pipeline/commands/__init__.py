"""Groups of commands that `pipeline.cli` mounts; each imports what is heavy inside its functions."""
