"""Label local differential privacy: mechanism, keys, records, store, ledger, card. Imports only `core`."""
