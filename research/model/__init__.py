"""The decoder language model."""
