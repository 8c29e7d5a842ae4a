"""The papers' claims studied in depth: sweeps, schedules, attacks and counterexamples by exact small experiments."""
