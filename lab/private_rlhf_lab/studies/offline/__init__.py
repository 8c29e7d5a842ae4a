"""Offline private preference learning (PPKL Algorithm 1), exact: rates, efficiency, pessimism, the lower bound."""
