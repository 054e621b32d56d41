"""A draft tree drawn as text: the accepted path always, then the best of what it passed by."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from baselines.terminal import Glyphs, visible

COLUMN = 9  # cells of a probability column
LEAST_TOKEN = 15  # cells for a sign, a token and a count; a terminal too narrow for them gets fewer columns
LEAST_WIDTH = 72  # of a step, so that steps line up


@dataclass(frozen=True)
class Node:
    """One node of a tree; probabilities given the parent, by column name, None where there is none."""

    token: str
    parent: int
    depth: int
    score: float  # log-probability of the drafted path, what the tree was grown by
    probabilities: dict[str, float | None]
    accepted: bool


@dataclass(frozen=True)
class TreeView:
    """What one step drafted and what the target said. Node 0 is the root."""

    step: int
    nodes: list[Node]
    columns: tuple[str, ...]
    bonus: str
    bonus_probability: float
    emitted: str
    expected: float  # drafts that a lossless rule accepts on average here

    @property
    def path(self) -> list[int]:
        """Indices of the accepted nodes, the root first."""
        return [index for index, node in enumerate(self.nodes) if node.accepted]

    @property
    def depth(self) -> int:
        return max(node.depth for node in self.nodes)


def choose(view: TreeView, rows: int) -> set[int]:
    """Return the nodes to draw: the path, one best sibling a level from the leaf up, then the best paths, up to `rows`.

    A node is drawn only below a drawn parent; the path is drawn even when it alone takes more than `rows`.
    """
    path = view.path
    drawn = set(path)
    others = [index for index, node in enumerate(view.nodes) if index not in drawn]
    for above in reversed(path):
        siblings = [index for index in others if view.nodes[index].parent == above]
        if siblings and len(drawn) < rows:
            drawn.add(max(siblings, key=lambda index: view.nodes[index].score))
    # parents score at least as high as their children and come first, so a best node's parent is drawn before it
    for index in sorted(others, key=lambda index: (-view.nodes[index].score, index)):
        if len(drawn) >= rows:
            break
        if view.nodes[index].parent in drawn:
            drawn.add(index)
    return drawn


def hidden_below(view: TreeView, drawn: set[int]) -> dict[int, int]:
    """Return how many undrawn nodes hang under each drawn node, counted at the nearest drawn ancestor."""
    counts = dict.fromkeys(drawn, 0)
    for index in set(range(len(view.nodes))) - drawn:
        above = view.nodes[index].parent
        while above not in drawn:
            above = view.nodes[above].parent
        counts[above] += 1
    return counts


def draw(view: TreeView, *, rows: int, width: int, glyphs: Glyphs) -> list[Text]:
    """Return the lines of a step, none wider than `width`: head, one a drawn node, the bonus token, what is hidden."""
    drawn = choose(view, rows)
    hidden = hidden_below(view, drawn)
    children: dict[int, list[int]] = {}
    for index in sorted(drawn, key=lambda index: (view.nodes[index].accepted, -view.nodes[index].score)):
        children.setdefault(view.nodes[index].parent, []).append(index)

    entries = list(_walk(children, view.path[-1], glyphs))
    deepest = max(cell_len(lead) for lead, _ in entries)
    while len(view.columns) > 1 and width - COLUMN * len(view.columns) < deepest + LEAST_TOKEN:
        view = replace(view, columns=view.columns[1:])
    columns = COLUMN * len(view.columns)
    needed = max(cell_len(lead) + 11 + cell_len(quoted(_token(view, index))) for lead, index in entries)
    label = min(max(needed, LEAST_WIDTH - columns), width - columns)
    width = label + columns
    lines = [_head(view, width, glyphs), _column_names(view, label)]
    for lead, index in entries:
        if index is None:
            lines.append(_bonus_line(view, lead, label, glyphs))
        else:
            lines.append(_node_line(view, index, lead, hidden[index], label, glyphs))
    undrawn = len(view.nodes) - len(drawn)
    text = f"emits {quoted(view.emitted)}"
    if undrawn:
        note = f"+N: {undrawn} of {len(view.nodes) - 1} drafts not drawn"
        text = set_cell_size(text, width - len(note) - 2) + "  " + note
    lines.append(Text(set_cell_size(text, min(width, cell_len(text))), style="dim"))
    return lines


def _walk(children: dict[int, list[int]], leaf: int, glyphs: Glyphs) -> Iterator[tuple[str, int | None]]:
    """Yield (what stands before it, node) line by line; node None is the bonus token, the last child of `leaf`."""

    def below(index: int, lead: str, stem: str) -> Iterator[tuple[str, int | None]]:
        yield lead, index
        if index is None:
            return
        found = [*children.get(index, []), *([None] if index == leaf else [])]
        for child in found:
            tip, rest = (glyphs.last, "  ") if child == found[-1] else (glyphs.branch, glyphs.bar)
            yield from below(child, stem + tip, stem + rest)

    yield from below(0, "", "")


def _token(view: TreeView, index: int | None) -> str:
    return view.bonus if index is None else view.nodes[index].token


def quoted(token: str) -> str:
    """Return a token in quotes on one line, control characters escaped."""
    return '"' + visible(token).replace('"', '\\"') + '"'


def probability(value: float | None) -> str:
    """Return a probability in at most five characters: 1.00, 0.62, .0041, <1e-4."""
    if value is None:
        return ""
    if value >= 0.01:
        return f"{value:.2f}"
    return f"{value:.4f}"[1:] if value >= 5e-5 else "<1e-4"


def _head(view: TreeView, width: int, glyphs: Glyphs) -> Text:
    accepted, drafts = len(view.path) - 1, len(view.nodes) - 1
    drafted = f"{drafts} drafts to depth {view.depth}" if drafts else "nothing drafted"
    facts = [drafted, f"{view.expected:.2f} expected", f"{accepted} accepted + bonus"]
    name, left = f" step {view.step + 1} ", glyphs.rule * 2
    room = width - len(left) * 2 - len(name) - 1
    # a narrow terminal gets the last of them
    while len(text := f" {f' {glyphs.dot} '.join(facts)} ") > room and len(facts) > 1:
        facts.pop(0)
    middle = glyphs.rule * max(1, room + 1 - len(text))
    return Text.assemble((left, "dim"), (name, "bold"), (middle, "dim"), text, (left, "dim"))


def _column_names(view: TreeView, label: int) -> Text:
    return Text(" " * label + "".join(name.rjust(COLUMN) for name in view.columns), style="dim")


def _node_line(view: TreeView, index: int, lead: str, hidden: int, label: int, glyphs: Glyphs) -> Text:
    node = view.nodes[index]
    style = "bold green" if node.accepted else "dim"
    sign = glyphs.hit if node.accepted else glyphs.miss
    more = f" +{hidden}" if hidden else ""
    token = _cut(node.token, label - cell_len(lead) - 2 - len(more) - 1)
    text = Text.assemble((lead, "dim"), (f"{sign} ", style), (token, style), (more, "dim cyan"))
    if index == 0:
        text.append("  root", "dim")
        return text
    text.append(" " * (label - text.cell_len))
    for name in view.columns:
        text.append(probability(node.probabilities[name]).rjust(COLUMN), "bold" if node.accepted else "dim")
    return text


def _bonus_line(view: TreeView, lead: str, label: int, glyphs: Glyphs) -> Text:
    token = _cut(view.bonus, label - cell_len(lead) - 10)
    text = Text.assemble((lead, "dim"), (f"{glyphs.bonus} {token}", "bold yellow"), (" bonus", "yellow dim"))
    text.append(" " * (label - text.cell_len))
    for name in view.columns:
        value = view.bonus_probability if name == "target" else None
        text.append(probability(value).rjust(COLUMN), "bold yellow")
    return text


def _cut(token: str, room: int) -> str:
    """Return the quoted token in at most `room` cells; a cut one ends in two dots."""
    text = quoted(token)
    return text if cell_len(text) <= room else set_cell_size(text, max(room - 3, 1)).rstrip() + '.."'
