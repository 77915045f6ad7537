"""Verifying: checks whether every save of a place has exactly the saved bytes."""
