"""Fetching: saves come from a mirror to this disk, verified, and are read there."""
