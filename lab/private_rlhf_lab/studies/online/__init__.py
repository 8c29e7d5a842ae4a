"""Online private preference learning (POKL Algorithm 2) on finite classes by enumeration: regret by explorer."""
