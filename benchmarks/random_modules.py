"""Run random modules and their loops on an engine beside eager, in many processes, and count what comes of them.

python -m benchmarks.random_modules --programs 1000 --engine aten [--seed 0] [--jobs J] [--minutes M] [--minimise K]
                                    [--json FILE] [--loops users|training|inference]
python -m benchmarks.random_modules --source FILE --engine aten [--budget B] [--verify full]     one saved program

Every difference is printed with its source, then a table of counts; the JSON file (by default
benchmarks/results/modules_ENGINE.json) holds the same. A program that takes the process with it, or longer than
--timeout seconds, is counted as such and the others go on. Ends with 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

RESULTS = Path(__file__).resolve().parent / "results"
RENEWED = 400  # programs of one process: what compilers keep of each adds up
LOOPS = ("training", "inference", "users")
WRONG = ("different", "error", "crash", "timeout")
ORDER = ("same", "refused", "fallback", "lenient", *WRONG)


# -- one process ----------------------------------------------------------------------------------------------------


def count_steps_alone() -> None:
    """Budgets are of a program's steps, as in the tests: not of what its comparison and earlier programs keep."""
    from memopt.calls.residents import Residents
    from memopt.step.before_calls import BeforeCalls

    Residents.look_around = lambda self, args, kwargs: None  # type: ignore[method-assign]
    BeforeCalls.expect = lambda self, device, owner: None  # type: ignore[method-assign]


def work(args: argparse.Namespace) -> None:
    """Read seeds, answer each with a line of JSON. Nothing else may write to the answers' pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    import torch

    import tests.modules.judging  # noqa: F401 - before the clock of the first program runs

    torch.set_num_threads(1)
    count_steps_alone()
    print("READY", file=answers)
    for line in sys.stdin:
        print(json.dumps(row(int(line), args)), file=answers)


def row(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    from tests.modules.judging import FAILURES, FALLBACK, judge
    from tests.modules.programs import program
    from tests.modules.settings import settings

    gc.collect()
    gc.freeze()  # what compilers keep of earlier programs is not looked through at every measured step
    started = time.perf_counter()
    budget, verify = settings(seed, args.loops)
    made = program(seed, args.loops)
    verdict = judge(made, args.engine, budget, verify)
    found = {"seed": seed, "kind": verdict.kind, "detail": verdict.detail, "words": verdict.words}
    found |= {"budget": budget, "verify": verify, "final_budget": verdict.budget}
    if verdict.kind in (FALLBACK, *FAILURES):
        found["source"] = made.source
    return found | {"seconds": round(time.perf_counter() - started, 2)}


def source_of(seed: int, loops: str) -> str:
    from tests.modules.programs import program

    return program(seed, loops).source


def minimised_row(found: dict[str, Any], engine: str, loops: str) -> str:
    from tests.modules.judging import Verdict
    from tests.modules.minimise import minimised
    from tests.modules.settings import settings

    verdict = Verdict(found["kind"], found["detail"])
    return minimised(str(found["seed"]), found["source"], verdict, engine, *settings(found["seed"], loops))


# -- many processes -------------------------------------------------------------------------------------------------


class Worker:
    """A process with caches of its own, and a thread that reads its answers."""

    def __init__(self, arguments: list[str]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
        caches = {"MEMOPT_CACHE_DIR": f"{self.folder.name}/m", "TORCHINDUCTOR_CACHE_DIR": f"{self.folder.name}/i"}
        threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.random_modules", "--worker", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, **caches, **threads}, start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.lines.get(timeout=600)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, seed: int, seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{seed}\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            return {"seed": seed, "kind": "timeout", "detail": f"over {seconds:g} s", "seconds": seconds}
        except OSError:
            line = ""
        if line:
            return json.loads(line)
        self.errors.seek(0)
        text = self.errors.read()
        at = text.find("Current thread")
        detail = f"signal {-(self.process.wait(60))}\n{text[at : at + 800] if at >= 0 else text[-800:]}"
        return {"seed": seed, "kind": "crash", "detail": detail, "seconds": 0.0}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()
        self.folder.cleanup()


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all programs, or of those that were begun within the minutes given."""
    seeds: queue.Queue[int] = queue.Queue()
    for seed in range(args.seed, args.seed + args.programs):
        seeds.put(seed)
    rows: list[dict[str, Any]] = []
    ends = time.monotonic() + args.minutes * 60 if args.minutes else float("inf")
    arguments = ["--engine", args.engine, "--loops", args.loops]

    def serve() -> None:
        worker, asked = None, 0
        while time.monotonic() < ends:
            try:
                seed = seeds.get_nowait()
            except queue.Empty:
                break
            if worker is None:
                worker, asked = Worker(arguments), 0
            found = worker.ask(seed, args.timeout)
            rows.append(found)
            asked += 1
            if found["kind"] in ("crash", "timeout") or asked >= RENEWED:
                worker.end()
                worker = None
        if worker is not None:
            worker.end()

    threads = [threading.Thread(target=serve) for _ in range(args.jobs)]
    for thread in threads:
        thread.start()
    started, said, shown = time.monotonic(), 0.0, 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        for found in rows[shown:]:
            shown += 1
            if found["kind"] in WRONG:
                text = found["detail"].split("\n")[0][:200]
                print(f"seed {found['seed']}: {found['kind']}: {text}", file=sys.stderr, flush=True)
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"{said - started:5.0f} s: {len(rows)} programs: {counted(rows)}", file=sys.stderr, flush=True)
    return sorted(rows, key=lambda one: one["seed"])


def counted(rows: list[dict[str, Any]]) -> dict[str, int]:
    counts = collections.Counter(one["kind"] for one in rows)
    return {kind: counts[kind] for kind in ORDER if counts[kind]}


def gist(text: str) -> str:
    """A line without its numbers, to count lines of one kind."""
    return "".join("·" if sign.isdigit() else sign for sign in text.split("\n")[0])[:150]


def result_of(args: argparse.Namespace, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    import torch

    refusals = collections.Counter(gist(one["detail"]) for one in rows if one["kind"] in ("refused", "fallback"))
    words = collections.Counter(gist(line) for one in rows for line in set(one.get("words", ())))
    return {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "engine": args.engine,
        "seed": args.seed,
        "asked": args.programs,
        "programs": len(rows),
        "loops": args.loops,
        "seconds": round(seconds),
        "counts": {kind: sum(one["kind"] == kind for one in rows) for kind in ORDER},
        "refusals": dict(refusals.most_common()),
        "words": dict(words.most_common(30)),
        "fallbacks": [one for one in rows if one["kind"] == "fallback"],
        "wrong": [one for one in rows if one["kind"] in WRONG],
    }


def show(found: dict[str, Any]) -> None:
    settings = f"budget={found.get('budget')}, verify={found.get('verify')!r}"
    print(f"\n# seed {found['seed']}: {found['kind']}; {settings}\n# {found['detail'][:1500]}")
    print(found.get("minimised") or found.get("source", ""), flush=True)


def one_source(args: argparse.Namespace) -> int:
    from tests.modules.judging import FAILURES, Verdict, judge
    from tests.modules.minimise import minimised
    from tests.modules.programs import judged_by_eager

    count_steps_alone()
    source = Path(args.source).read_text()
    made = judged_by_eager(args.source, source) or judged_by_eager(args.source, source, raising=True)
    if made is None:
        print("eager does not carry it out")
        return 2
    budget = None if args.budget is None else float(args.budget) if "." in args.budget else args.budget
    verify = {"False": False, "True": True}.get(args.verify, args.verify)
    verdict = judge(made, args.engine, budget, verify)
    print(f"{verdict.kind}: {verdict.detail}", *verdict.words, sep="\n")
    if args.minimise and verdict.kind in FAILURES:
        verdict = Verdict(verdict.kind, verdict.detail)
        print(minimised(args.source, source, verdict, args.engine, budget, verify))
    return int(verdict.kind in FAILURES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--engine", default="aten")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--minutes", type=float, help="begin no program later than this")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one program")
    parser.add_argument("--minimise", type=int, default=0, help="cut down so many of what fails")
    parser.add_argument("--loops", choices=LOOPS, default="training", help="inference: loops that only call the model")
    parser.add_argument("--json")
    parser.add_argument("--source")
    parser.add_argument("--budget")
    parser.add_argument("--verify", default="True")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    if args.source:
        return one_source(args)
    started = time.monotonic()
    rows = run_all(args)
    result = result_of(args, rows, time.monotonic() - started)
    for found in (*result["fallbacks"], *result["wrong"]):
        if "source" not in found:
            found["source"] = source_of(found["seed"], args.loops)
        if found["kind"] != "timeout" and args.minimise > 0:
            args.minimise -= 1
            found["minimised"] = minimised_row(found, args.engine, args.loops)
        show(found)
    path = Path(args.json) if args.json else RESULTS / f"modules_{args.engine}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for title in ("refusals", "words"):
        print(f"\n{title}:")
        for line, count in result[title].items():
            print(f"{count:7,}  {line}")
    print(f"\n{'engine':10} {'programs':>9} " + " ".join(f"{kind:>9}" for kind in ORDER))
    print(f"{args.engine:10} {len(rows):9,} " + " ".join(f"{result['counts'][kind]:9,}" for kind in ORDER))
    return int(bool(result["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
