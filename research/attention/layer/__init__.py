"""The DeepSeek-V4 attention layer in Haiku, and its parts."""
