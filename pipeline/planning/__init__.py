"""What a recipe will cost before it runs: tokens, memory per process, and hours after a short calibration."""
