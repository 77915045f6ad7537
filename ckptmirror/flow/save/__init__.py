"""Saving: from live state to a save that exists on this disk; emergency snapshots and their second place."""
