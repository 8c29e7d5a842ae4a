"""Behaviour policies whose value functions are estimated, as safetensors, with their scores.

`python -m private_rlhf_lab.studies.dptd.train_behaviour` made them.
"""
