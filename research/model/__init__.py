"""The decoder language model around the attention layer."""
