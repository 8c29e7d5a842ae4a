"""Label local differential privacy: mechanism, keys, records, store, ledger, card. Imports `core` alone."""
