"""The papers' algorithms, exact and small: each module checks published claims and writes what it measured."""
