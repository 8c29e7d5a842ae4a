"""KL-regularised policies as private samplers: the accountants against brute force over neighbouring data sets."""
