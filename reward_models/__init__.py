"""Reward models learned from randomised preference labels: fitting, bounding, scoring, saving, doubting.

    losses       the smooth reward bound; private likelihood (default), least squares, debiased, uncorrected
    basis        coordinates of frozen features: centred, principal, whitened; sums over processes
    linear       the linear class by Fisher scoring
    ridge        the ridge by held-out private log-likelihood or by evidence
    head         the linear head of a reward: basis, ridge and fit
    model        sequence-classification models: load, pool, score
    backbone     the first layers of a causal LM as such a model, and their merge after training
    pairs        released pairs as token ids and as features
    uncertainty  bonuses for pessimism and optimism as they are read: Fisher, elliptical, ensemble, dropout; storage
    bonus_fit    the fit of a bonus of each kind
    checkpoint   saving and loading with the required privacy metadata; the text of the model card
    trainer      TRL's RewardTrainer with a private loss
    training     LoRA, 4-bit LoRA and full training, with early stopping
    scorer       r̄ and Γ of responses, from their text
    external     models fitted elsewhere: in the reward's place, and beside it
    gibbs        the policy that is best for a reward

Import from the modules: nothing is imported here, so that the mathematics does not load transformers.
"""
