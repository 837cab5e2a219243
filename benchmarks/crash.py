"""200 kills of a small training run on the embedded model, each resumed; the end must equal an undisturbed run.

    python benchmarks/crash.py [DIR]          about 10 minutes on two cores

CI does the same with 20 (tests/bench/test_crash.py). What is killed, where and how: keyhole/bench/crash.py.
"""

import sys
import tempfile

from keyhole.bench.crash import main

KILLS = {"zo": 100, "zo-resident": 50, "adamw": 50}

if __name__ == "__main__":
    directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="keyhole-crash-")
    for seed, (method, kills) in enumerate(KILLS.items()):
        main([directory, "--method", method, "--kills", str(kills), "--seed", str(seed)])
