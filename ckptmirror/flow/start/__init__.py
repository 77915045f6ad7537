"""Starting: which rank leads a node, which run it continues, and from which save."""
