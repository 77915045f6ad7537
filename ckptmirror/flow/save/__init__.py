"""Saving: from live state to a save on this disk; emergency snapshots and their copies in a persistent directory."""
