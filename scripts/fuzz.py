"""Runs the property-based tests for a given time, every round with another seed:

    python scripts/fuzz.py --seconds 600 [arguments of pytest]

`make fuzz SECONDS=600` does the same. A failure is shown by pytest with the call that fails, shrunk; the
round goes on with the other tests, and the next round follows. The last round, of a minute or so, is finished
when the time is over. The exit status is 1 if there was a failure.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dfgnn.runtime.programs import Parser, integer, number  # noqa: E402


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--seconds", type=number(above=0), default=600, help="no round begins later")
    parser.add_argument("--seed", type=integer(0), help="of the first round; default: the time")
    args, rest = parser.parse_known_args()
    seed = args.seed if args.seed is not None else int(time.time())
    end, failed, rounds = time.monotonic() + args.seconds, [], 0
    tests = sorted(ROOT.glob("tests/fuzz/test_fuzz_*.py"))
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "long"}
    while time.monotonic() < end:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        # One test is a minute or so of examples on an idle machine, without a bound on a busy one.
        command += ["--override-ini=faulthandler_timeout=3600"]
        command += [*map(str, tests), f"--hypothesis-seed={seed}", *rest]
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        rounds += 1
        if status:
            failed.append(seed)
        seed += 1
    print(
        f"fuzz: {rounds} whole rounds in {args.seconds:.0f} s, seeds of those that failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
