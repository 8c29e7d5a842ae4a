"""One module per stage. Launchers start them here, before PyTorch is imported."""

from private_rlhf.core.environment import calm_bars, wait_briefly

wait_briefly()
calm_bars()
