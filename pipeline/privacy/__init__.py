"""Label local differential privacy: mechanism, keys, records, event store, ledger, card. Imports `pipeline.core` alone."""
