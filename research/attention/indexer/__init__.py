"""CSA's indexer: which entries a query attends to, how that is scored, chosen and learned."""
