"""This disk: atomic files, checksums, what is in a root, who holds it, and the pending-uploads table."""
