"""Keeping: what is safe where, what may be deleted, and a table and a disk that agree."""
