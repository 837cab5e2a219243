"""Kills training with SIGKILL again and again, resumes it, and compares the end with a run that was never killed.

    python -m tests.crash DIR                              200 kills: 100 of zo, 50 of zo-resident, 50 of adamw; ten
                                                           minutes on two cores
    python -m tests.crash --kills 20 --method zo DIR       20 kills of one of them
    python -m tests.crash --every --steps 4 DIR            one kill before every single call that changes the disk

Half of the kills come from outside, at a random instant of the life of the process. The others come from inside, at a
random one of the calls that matter on disk (write, fsync, rename, delete), just before or just after it: in the middle
of a snapshot, of a journal record, of a rename, of the deletion of an old checkpoint.

Every life is a fork of one process that has imported everything, so it costs a fraction of a second. Before each resume
the output directory is what the dead process left, and nothing else.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CALLS = ("pwrite", "write", "fsync", "replace", "unlink", "rmdir", "ftruncate")
ALL_CALLS = (*CALLS, "open", "mkdir", "rename", "exchange")
MOST_CALLS = {"pwrite": 120, "write": 60, "fsync": 120, "replace": 14, "unlink": 30, "rmdir": 4, "ftruncate": 2}
METHODS: dict[str, dict[str, Any]] = {
    "zo": {"method": "zo", "learning_rate": 1e-4, "placement": "stream", "dtype": "bfloat16"},
    "zo-resident": {"method": "zo", "learning_rate": 1e-4},
    "adamw": {"method": "adamw", "learning_rate": 1e-4},
}
KILLS = {"zo": 100, "zo-resident": 50, "adamw": 50}


@dataclass
class Kills:
    """What was done, and where processes died."""

    outside: int = 0
    inside: int = 0
    runs: int = 1
    lives: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return self.outside + self.inside


def die_at(call: str, count: int, after: bool) -> None:
    """Lets this process kill itself at the count-th use of os.<call>, or of the exchange of two names."""
    owner: Any = os
    if call == "exchange":
        from keyhole.disk import files as owner
    real, left = getattr(owner, call), [count]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, call, deadly)


def live(config: Any, log: Path, arrange: Callable[[], None]) -> int:
    """Starts a life of a run: resumes whatever there is. Returns its process number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(out, stream)
        arrange()
        from keyhole.training.start import train

        code = train(config, resume="last")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def outcome(pid: int) -> int:
    """0: finished; SIGKILL, negative: killed. Anything else is a failure."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"a run ended with exit code {code} instead of going on; see its log")
    return code


def crash(config: Any, kills: int, seed: int, log: Path, say: Callable[[str], None] = print) -> Kills:
    """Runs `config` to its end, killed `kills` times on the way; starts over where a run ends before that."""
    begin_s, rng, done = time.perf_counter(), random.Random(seed), Kills()
    reference = replace(config, output_dir=f"{config.output_dir}-reference")
    outcome(live(reference, log, lambda: None))
    life_s = time.perf_counter() - begin_s
    while True:
        if done.total >= kills:
            outcome(live(config, log, lambda: None))
            compare(reference, config)
            done.seconds = time.perf_counter() - begin_s
            return done
        done.lives += 1
        code = _one_life(config, log, rng, life_s, done)
        if code == 0:
            compare(reference, config)
            say(f"{done.total} kills in {done.lives} lives; run {done.runs} ended as it should")
            shutil.rmtree(config.output_dir)
            done.runs += 1


def every(config: Any, log: Path, say: Callable[[str], None] = print, calls: tuple[str, ...] = ALL_CALLS) -> Kills:
    """Runs `config` once for every call that changes the disk: killed before it, then resumed, then compared."""
    begin_s, done = time.perf_counter(), Kills(runs=0)
    reference = replace(config, output_dir=f"{config.output_dir}-reference")
    outcome(live(reference, log, lambda: None))
    for call in calls:
        code = 1
        for count in range(1, 10**6):
            shutil.rmtree(config.output_dir, ignore_errors=True)
            code = outcome(live(config, log, lambda call=call, count=count: die_at(call, count, False)))
            if code == 0:
                say(f"{call}: {count - 1} kills")
                break
            outcome(live(config, log, lambda: None))
            compare(reference, config)
            done.inside, done.lives, done.runs = done.inside + 1, done.lives + 2, done.runs + 1
    done.seconds = time.perf_counter() - begin_s
    return done


def _one_life(config: Any, log: Path, rng: random.Random, life_s: float, done: Kills) -> int:
    inside = rng.random() < 0.5
    call, after = rng.choice(CALLS), rng.random() < 0.5
    count = rng.randint(1, MOST_CALLS[call])
    pid = live(config, log, (lambda: die_at(call, count, after)) if inside else (lambda: None))
    if not inside:
        time.sleep(rng.uniform(0.0, life_s))
        os.kill(pid, signal.SIGKILL)
    code = outcome(pid)
    if code:
        done.inside, done.outside = done.inside + inside, done.outside + (not inside)
    return code


def compare(reference: Any, config: Any) -> None:
    """The same weights to the bit, and the same metrics but for times and memory."""
    from keyhole.disk.weight_files import content_hash
    from keyhole.report.entries import read_metrics

    ours, theirs = (content_hash(Path(c.output_dir)) for c in (config, reference))
    if ours != theirs:
        raise SystemExit(f"{config.output_dir}: other weights than the run that was never killed")
    timed = ("seconds", "tokens_per_second", "host_gib", "gpu_gib", "changed", "_s")
    curves = [
        [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in read_metrics(_metrics(c))]
        for c in (config, reference)
    ]
    if curves[0] != curves[1]:
        raise SystemExit(f"{config.output_dir}: other metrics than the run that was never killed")
    left = [path.name for path in Path(config.output_dir).glob(".*")]
    if left:
        raise SystemExit(f"{config.output_dir}: {left[0]} was left behind")


def _metrics(config: Any) -> Path:
    return Path(config.output_dir) / "run" / "metrics.jsonl"


def prepare(directory: Path, method: str, steps: int, model: str = "demo", data: str = "demo") -> Any:
    """The config of a small run, and everything imported that it needs. Its curve is an empty file: drawing takes
    longer than the run."""
    import torch

    torch.set_num_threads(1)
    import keyhole.training.build  # noqa: F401
    from keyhole.config import TrainConfig, resolve
    from keyhole.data.run import load_tokenizer
    from keyhole.model.structure.skeleton import build, read_config

    base = {"model": model, "train_data": data, "output_dir": str(directory / method), "max_steps": steps}
    base |= {"batch_size": 2, "save_steps": min(3, steps // 2), "device": "cpu", "max_length": 64}
    config = resolve(TrainConfig(**base | METHODS[method]))[0]
    load_tokenizer(config.model)
    build(read_config(config.model), torch.float32)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill training again and again; resume; compare.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, help=f"default: {KILLS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--method", choices=sorted(METHODS), help="default: all, one after the other")
    parser.add_argument("--every", action="store_true", help="one kill before every call, instead of random ones")
    parser.add_argument("--calls", nargs="+", default=ALL_CALLS, choices=ALL_CALLS, help="with --every: only these")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", default="demo")
    asked = parser.parse_args()
    asked.directory.mkdir(parents=True, exist_ok=True)
    for seed, method in enumerate([asked.method] if asked.method else KILLS, asked.seed):
        config = prepare(asked.directory, method, asked.steps, asked.model, asked.data)
        log = asked.directory / f"{method}.log"
        found = (
            every(config, log, calls=asked.calls)
            if asked.every
            else crash(config, asked.kills or KILLS[method], seed, log)
        )
        where = f"{found.outside} from outside, {found.inside} at a call"
        print(f"{method}: {found.total} kills ({where}), {found.lives} lives, {found.runs} runs, {found.seconds:.0f} s")
        print("weights and metrics equal those of a run that was never killed")


if __name__ == "__main__":
    main()
