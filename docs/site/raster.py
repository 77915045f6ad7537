"""Makes a PNG of a drawn timeline, for pages whose readers cannot show an SVG: ``raster.py FROM.svg TO.png``.

Rules:
* The light colours are drawn, twice as fine as the SVG says.
* A machine without a font would leave all words out: then nothing is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["main", "png_of"]

FINER = 2.0
FONT = "DejaVu Sans"


def png_of(svg: str) -> bytes:
    """Return the picture as PNG.

    Raises:
        ValueError: No words can be drawn: this machine has no font.
    """
    frame = '<svg xmlns="http://www.w3.org/2000/svg" width="99" height="20" font-family="sans-serif">{}</svg>'
    if _drawn(frame.format('<text y="15">step</text>')) == _drawn(frame.format("")):
        raise ValueError(f"no word can be drawn; install the font {FONT}")
    return _drawn(svg)


def _drawn(svg: str) -> bytes:
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=FINER, sans_serif_family=FONT))


def main(arguments: list[str]) -> int:
    """Convert one file."""
    source, target = map(Path, arguments)
    target.write_bytes(png_of(source.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
