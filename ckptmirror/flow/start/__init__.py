"""Starting: who leads a node, which run goes on, and from which save."""
