"""CSA's indexer: the scores of entries, the selection by them, and the loss of the scores."""
