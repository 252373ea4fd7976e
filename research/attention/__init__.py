"""DeepSeek-V4 attention: who sees whom, the layer, and the backends that compute it."""
