"""The shapes (tfm.json_shape) of a resolved cell and of a cell.json: what is read of them, and so has to be there."""

from tfm.json_shape import NUMBER
from tfm.manifest import SEAL

KINDS = ("requests", "steps", "trees")
# a resolved cell as plan.json lists it and cell.json repeats it: what is read of it. Newer keys may be missing
DECODE = {"method": str, "temperature": NUMBER, "rule": str, "candidates": int, "max_new_tokens": int, "requests": int}
DECODE |= dict.fromkeys(("budget", "width", "children", "depth"), (int, None)) | {"gdn_backend": str, "head?": str}
CELL = dict.fromkeys(("suite", "engine", "target", "dataset", "domain", "variant", "setting", "clock", "device"), str)
CELL |= {"dtype": str, "template": str, "seed": int, "traced": bool, "reasoning": bool, "decode": DECODE}
ENVIRONMENT = {"git": {"commit": (str, None), "dirty": (bool, None)}}
# a cell.json: what `identity` puts into every row, and what certifies the files
RECORD = {"cell": CELL, "files": {f"{kind}.parquet": {"sha256": str, "rows": int} for kind in KINDS}}
RECORD |= dict.fromkeys(("source_digest", "cell_digest", "prompts_sha256", SEAL), str)
RECORD |= {"device": {"name": str, "torch_threads": (int, None)}, "environment": ENVIRONMENT}
