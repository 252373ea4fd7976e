"""What computes attention, a module each: `research.attention.attend` has the contract."""

NAMES = ("dot_product", "blockwise", "splash")
