"""Check every weight file of a suite against its pins before anything is loaded, and write down what was found."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from input_errors import json_argument, told

from tfm.manifest import write_json
from tfm.tokenizer import check_folder_tokenizers
from tfm.weight_pins import check_checkpoints

DESCRIPTION = """
Reads all files of the parts that --checkpoints (JSON: part -> repo, revision, sha256) names under --weights. Writes
--out: part, file, sha256 and what it was compared with. Also refuses a drafter or Weaver that comes with another
tokenizer than the target's. Last line of stdout: one JSON object. Exit 2 when a file is not the pinned one.
"""


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, type=Path, help="folder that holds target/, drafter/ and weaver/")
    parser.add_argument("--checkpoints", required=True, help="the section `checkpoints` of the suite's config, as JSON")
    parser.add_argument("--out", required=True, type=Path, help="weights.json")
    options = parser.parse_args()
    pins = json_argument("--checkpoints", options.checkpoints)
    checked = check_checkpoints(options.weights, pins)
    check_folder_tokenizers({part: options.weights / part for part in pins})
    write_json(options.out, {"checkpoints": pins, "files": [asdict(entry) for entry in checked]})
    print(json.dumps({"weights": str(options.out), "files": len(checked)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
