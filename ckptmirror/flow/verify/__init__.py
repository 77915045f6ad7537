"""Verifying: whether every save of a place is what was saved."""
