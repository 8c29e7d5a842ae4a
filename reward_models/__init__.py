"""Reward models learned from randomised preference labels; imports nothing from `pipeline`.

    losses       private likelihood (default), least squares, debiased, uncorrected; Fisher weight
    bound        the smooth reward bound
    basis        coordinates of frozen features: centred, principal, whitened
    linear       the linear class by Fisher scoring
    ridge        the ridge by held-out private log-likelihood
    model        sequence-classification models: build, pool, score
    uncertainty  bonuses for pessimism and optimism
    checkpoint   saving and loading with the required privacy metadata
    trainer      LoRA and full training on TRL's RewardTrainer

Import from the modules: nothing is imported here, so that the mathematics does not load transformers.
"""
