"""Language models: loading, saving, sampling, log-probabilities, features."""
