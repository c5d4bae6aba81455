"""Turn a junit file of a test run into the small JSON kept under benchmarks/results.

python scripts/suite_results.py suite.xml --device "NVIDIA H200" --command "make test-gpu" --out results.json
"""

from __future__ import annotations

import argparse
import collections
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def summary(junit: Path, device: str, command: str) -> dict:
    """Counts of a junit file, in all and by test file, and the names of what failed."""
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
    files: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failed = []
    for case in suite.iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = "passed" if not kinds else "skipped" if kinds == {"skipped"} else "failed"
        files[case.get("classname", "")][outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    total = sum(files.values(), collections.Counter())
    return {
        "device": device,
        "date": suite.get("timestamp"),
        "command": command,
        "seconds": float(suite.get("time", 0.0)),
        "passed": total["passed"],
        "failed": total["failed"],
        "skipped": total["skipped"],
        "files": {name: dict(counts) for name, counts in sorted(files.items())},
        "failures": failed,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    made = summary(arguments.junit, arguments.device, arguments.command)
    arguments.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{made['passed']} passed, {made['failed']} failed, {made['skipped']} skipped")


if __name__ == "__main__":
    main()
