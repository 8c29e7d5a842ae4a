"""One module per stage. Launchers start them here, before PyTorch is imported."""

from private_rlhf.core.environment import wait_briefly

wait_briefly()
