"""Other people's loops: how ckptmirror fits into them. Each uses the public names only."""
