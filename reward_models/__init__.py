"""Reward models learned from randomised preference labels: fitting, bounding, scoring, saving, doubting.

    losses       private likelihood (default), least squares, debiased, uncorrected; Fisher weight
    bound        the smooth reward bound
    basis        coordinates of frozen features: centred, principal, whitened
    linear       the linear class by Fisher scoring
    ridge        the ridge by held-out private log-likelihood
    model        sequence-classification models: build, pool, score
    uncertainty  bonuses for pessimism and optimism: what they share, and the Fisher bonus
    elliptical   the paper's bonus with its constants
    ensemble     bootstrap heads
    dropout      Monte-Carlo dropout, for models that have any
    bonuses      their names, and how they are stored
    checkpoint   saving and loading with the required privacy metadata
    trainer      LoRA, 4-bit LoRA and full training on TRL's RewardTrainer
    scorer       r̄ and Γ of responses, from their text
    gibbs        the policy that is best for a reward
    external, extra_rewards   models fitted elsewhere: in the reward's place, and beside it
    early_stopping, length_groups   what the trainer can be asked to do

Import from the modules: nothing is imported here, so that the mathematics does not load transformers.
"""
