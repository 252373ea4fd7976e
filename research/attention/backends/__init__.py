"""The backends, a module each. `research.attention.attend.Backend` is their contract."""

NAMES = ("dot_product", "blockwise", "joined", "splash")
