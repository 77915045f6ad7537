"""``python -m ckptmirror``: the command line."""

from ckptmirror.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
