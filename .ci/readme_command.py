"""Print the shell command of a README block marked `<!-- command: NAME -->`, so that CI runs what the README says."""

import pathlib
import re
import sys


def readme_command(text: str, name: str) -> str:
    found = re.findall(rf"<!-- command: {re.escape(name)} -->\s*```\w*\n(.*?)```", text, flags=re.DOTALL)
    if len(found) != 1:
        raise SystemExit(f"README.md: {len(found)} blocks marked 'command: {name}', expected one")
    return found[0].strip()


if __name__ == "__main__":
    root = pathlib.Path(__file__).resolve().parent.parent
    print(readme_command((root / "README.md").read_text(), sys.argv[1]))
