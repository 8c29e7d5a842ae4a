"""Programs behind the results pages; each runs as `python -m private_rlhf_lab.benches.NAME`."""
