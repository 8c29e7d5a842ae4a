"""Label local differential privacy: mechanism, keys, canonical records, privacy card. Imports `pipeline.core` alone."""
