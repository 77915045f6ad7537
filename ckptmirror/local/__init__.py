"""The local disk: atomic files, checksums, the content of a root, its locks, and the pending-uploads table."""
