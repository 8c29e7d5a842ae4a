"""Groups of commands that `private_rlhf.cli` mounts; each imports what is heavy inside its functions."""
