"""Which channels or weights are removed: scores of sparsers, ratios and budgets."""
