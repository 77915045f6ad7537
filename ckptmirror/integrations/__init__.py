"""Other people's loops: how ckptmirror fits into them. Each uses only the public names."""
