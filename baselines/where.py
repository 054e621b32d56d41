"""The condition of `tfm cells --where`: comparisons of fields with values, joined by and, or, not. Nothing is executed.

A word that names no field is a value, so `method==tfm` needs no quotes, nor does `variant==tfm-b64-w4`.
"""

import ast
import operator
from collections.abc import Callable

from baselines.refusals import did_you_mean

COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}
WORDS = {"true": True, "false": False, "none": None, "null": None}
HELP = "write comparisons such as method==tfm and budget>=64, joined by and, or, not; quote values with dots"


class Condition:
    """A parsed condition over rows (dicts) that have `kinds`: field -> the type of its values, str, bool or float."""

    def __init__(self, text: str, kinds: dict[str, type]):
        """Raise ValueError for anything but the above, and for an unknown field, naming the fields."""
        self._text, self._kinds = text, kinds
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"where: {text!r} cannot be read; {HELP}") from error
        try:
            self._test = self._parse(tree.body)
        except RecursionError as error:  # Python 3.13 parses what nests deeper than its own stack
            raise ValueError(f"where: {text!r} nests too deep; {HELP}") from error

    def __call__(self, row: dict) -> bool:
        """Return whether a row meets the condition; a comparison by size with an empty value is false."""
        return self._test(row)

    def _parse(self, node: ast.expr) -> Callable[[dict], bool]:
        if isinstance(node, ast.BoolOp):
            tests = [self._parse(value) for value in node.values]
            join = all if isinstance(node.op, ast.And) else any
            return lambda row: join(test(row) for test in tests)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            test = self._parse(node.operand)
            return lambda row: not test(row)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            tests = [self._compare(*three) for three in zip(sides, node.ops, sides[1:], strict=False)]
            return lambda row: all(test(row) for test in tests)
        if isinstance(node, ast.Name):
            field = self._field(node)
            if self._kinds[field] is bool:
                return lambda row: bool(row[field])
        raise self._refuse(node)

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Callable[[dict], bool]:
        if type(op) not in COMPARISONS:
            raise self._refuse(left)
        compare, sized = COMPARISONS[type(op)], isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        if isinstance(op, ast.In | ast.NotIn):
            field = self._field(left)
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                right = ast.List([right])
            values = [self._value(item, field) for item in right.elts]
            return lambda row: compare(row[field], values)
        if self._is_field(left):
            field, value = self._field(left), right
            order = lambda one, other: compare(one, other)  # noqa: E731
        else:
            field, value = self._field(right, left), left
            order = lambda one, other: compare(other, one)  # noqa: E731
        wanted = self._value(value, field)
        return lambda row: not (sized and (row[field] is None or wanted is None)) and order(row[field], wanted)

    def _is_field(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._kinds

    def _field(self, node: ast.expr, other: ast.expr | None = None) -> str:
        if self._is_field(node):
            return node.id
        # of `metod==tfm` the left side is the one that should be a field
        wrong = other if isinstance(other, ast.Name) else node
        name = ast.get_source_segment(self._text.strip(), wrong) or self._text
        hint = did_you_mean(name, self._kinds)
        raise ValueError(f"where: {name!r} is no field; {hint}fields: {', '.join(self._kinds)}")

    def _value(self, node: ast.expr, field: str):
        kind = self._kinds[field]
        value = self._literal(node)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or (is_number if kind is float else isinstance(value, kind)):
            return value
        what = {str: "a word", bool: "true or false", float: "a number"}[kind]
        raise ValueError(f"where: {field} is {what}, {value!r} is not; {HELP}")

    def _literal(self, node: ast.expr):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self._literal(node.operand)
            if isinstance(inner, int | float) and not isinstance(inner, bool):
                return -inner
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
            return node.value
        if isinstance(node, ast.Name):
            return WORDS.get(node.id.lower(), node.id)
        if _is_word(node):
            word = ast.get_source_segment(self._text.strip(), node) or ""
            if word and not any(char.isspace() for char in word):
                return word
        raise self._refuse(node)

    def _refuse(self, node: ast.expr) -> ValueError:
        part = ast.get_source_segment(self._text.strip(), node) or self._text
        return ValueError(f"where: {part!r} is not allowed; {HELP}")


def _is_word(node: ast.expr) -> bool:
    """Whether a node is names and numbers joined by dashes, as in tfm-b64-w4."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return _is_word(node.left) and _is_word(node.right)
    return isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and type(node.value) is int)
