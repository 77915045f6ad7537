"""Retention: decides what is safe and may be deleted, deletes it, and makes the table and the disk agree."""
