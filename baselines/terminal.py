"""Where commands write: rich in a terminal, plain lines in a pipe, and nothing that a terminal would obey."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Glyphs:
    """The signs of a screen; the second set is for terminals that cannot write the first."""

    good: str = "✓"
    bad: str = "✗"
    open: str = "·"
    note: str = "!"
    hit: str = "●"
    miss: str = "○"
    bonus: str = "★"
    branch: str = "├─"
    last: str = "└─"
    bar: str = "│ "
    rule: str = "─"
    dot: str = "·"
    full: str = "━"


ASCII = Glyphs("+", "x", ".", "!", "*", "o", "=", "|-", "`-", "| ", "-", "-", "=")


class Screen:
    """Standard output: styled text in a terminal (none under NO_COLOR), the same words without codes in a pipe."""

    def __init__(self, console: Console | None = None):
        if console is None:
            # a model may emit what this encoding lacks
            sys.stdout.reconfigure(errors="backslashreplace")
            # an empty colour system writes no code at all, bold and dim included
            plain = {"color_system": None} if os.environ.get("NO_COLOR") else {}
            console = Console(highlight=False, **plain)
        self.console = console
        self.is_terminal = console.is_terminal
        self.glyphs = Glyphs() if "utf" in (console.encoding or "").lower() else ASCII

    @property
    def width(self) -> int:
        return self.console.width

    def line(self, text: Text | str = "", *, wrap: bool = False) -> None:
        """Write one line; a terminal cuts it at its edge (or wraps it), a pipe gets all of it."""
        if self.is_terminal:
            how = {} if wrap else {"no_wrap": True, "overflow": "ellipsis", "crop": True}
            self.console.print(text, markup=False, **how)
        else:
            print(text.plain if isinstance(text, Text) else text, file=self.console.file)

    def write(self, text: str, style: str = "") -> None:
        """Write a piece of running text at once: exact in a pipe, control characters escaped in a terminal."""
        if self.is_terminal:
            self.console.print(Text(visible(text, keep="\n\t"), style), end="", soft_wrap=True)
        else:
            self.console.file.write(text)
        self.console.file.flush()

    def aside(self, text: Text | str) -> None:
        """Write a line that is no result: on the terminal, or on standard error where a pipe takes the results."""
        if self.is_terminal:
            self.line(text, wrap=True)
        else:
            self.console.file.flush()
            print(text.plain if isinstance(text, Text) else text, file=sys.stderr)

    def table(self, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write columns of text: aligned in a terminal, separated by tabs in a pipe. The first column is a name."""
        if not self.is_terminal:
            for row in (names, *rows):
                self.line("\t".join(row))
            return
        table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        for place, name in enumerate(names):
            table.add_column(name, justify="right" if place else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self.console.print()
        self.console.print(table)

    def bars(self, names: tuple[str, str], rows: Sequence[tuple[str, str, float]]) -> None:
        """Write (name, number, share of the longest) rows, with bars in a terminal."""
        if not self.is_terminal:
            self.table(names, [row[:2] for row in rows])
            return
        room = min(self.width, 80) - 24
        self.line()
        self.line(Text(f"{names[0]:<12}{names[1]:>9}", "dim"))
        for name, number, share in rows:
            bar = self.glyphs.full * round(share * room)
            self.line(Text.assemble(f"{name:<12}{number:>9}  ", (bar, "green")))


def visible(text: str, keep: str = "") -> str:
    """Return `text` with every character that is not printable (controls, line breaks, text direction) escaped."""
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )
