"""DeepSeek-V4 attention: the visibility of keys, the layer, the indexer, and the backends."""
