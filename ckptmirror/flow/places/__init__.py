"""What is where: mirrors, catalogs, lists of attempts, references, and the choice of a save."""
