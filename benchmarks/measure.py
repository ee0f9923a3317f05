"""The benchmark: our simulator beside three PyTorch loops, in one run, as ratios of CPU time.

Contestants take turns in processes of their own; the best of a few repetitions counts, compile time
apart. Then how the cost of our simulator grows with the number of clients, the cohort and the local
steps, and what a sweep costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.machine import Floor, copy_rate, floor_of, gemm_flops, sgemm_rate
from benchmarks.networks import NETWORKS
from benchmarks.workloads import WORKLOADS, Workload, num_steps
from fedscaffold import checks

__all__ = ["everything", "lines"]

Tell = Callable[[str], None]
REPEAT = {
    "ours": 2,
    "batched": 3,
    "tight": 3,
    "tutorial": 2,
    "vectorised": 2,
}  # ours runs twice: about as many tries for everybody
PRECISIONS = ("float32", "float64")
SWEEPS: dict[str, dict[str, Any]] = {
    "half of the clients a round": {"noise": 0.0, "cohort": 0.5},
    "noisy gradients": {"noise": 0.01, "cohort": 1.0},
}
RIVALS = ("tutorial", "tight", "batched")
THREADS = {
    "tutorial": (0,),
    "tight": (1, 2),
    "batched": (1, 2),
}  # 0: torch's own choice, the tutorial's too
CORES = (1, 2)
LARGE = 1e7  # operations of a client step, from which its products are timed by themselves
GROWTH: dict[str, list[dict[str, Any]]] = {
    "W1 clients N": [{"workload": "W1", "clients": n} for n in (50, 500, 5000)],
    "W1 cohort S": [{"workload": "W1", "replace": {"cohort": s}} for s in (5, 10, 20, 40)],
    "W1 local steps K": [
        {"workload": "W1", "replace": {"local_steps": k}} for k in (10, 20, 40, 80)
    ],
    "W4 clients N": [
        {"workload": "W4", "clients": n, "replace": {"rounds": r}}
        for n, r in ((100, 20), (1000, 2), (10000, 1))
    ],
}


def everything(only: str | None, growth: bool, tell: Tell) -> dict[str, Any]:
    """Measure the work loads named in `only` (all by default), and how cost grows if asked.

    Per work load: cpu_seconds, wall_seconds, compile_seconds, client_steps_per_second (of CPU),
    sgemm_fraction (matrix products done per second of CPU, over what one thread can), and the
    rivals' CPU time over ours: ratio_tutorial, ratio_tight (client by client, as tight as we could)
    and ratio_batched (our own idea, carried over to PyTorch). The tutorial's loop leaves the number
    of threads to torch, and so do we; ratio_tutorial_one_thread is kinder to it.
    """
    names = (
        [name.strip().upper() for name in only.split(",")]
        if only
        else [name.upper() for name in WORKLOADS]
    )
    for name in names:
        checks.choice("work load", name, [known.upper() for known in WORKLOADS])
    answer: dict[str, Any] = {"sgemm_gflops": sgemm_rate(), "copy_gigabytes": copy_rate()}
    for name in names:
        answer[name] = _side_by_side(name, answer["sgemm_gflops"], answer["copy_gigabytes"], tell)
    if growth and only is None:
        answer["growth"] = {title: _grown(title, tasks, tell) for title, tasks in GROWTH.items()}
        answer["sweep"] = {
            f"{kind}, {width}": _swept(kind, width, tell) for kind in SWEEPS for width in PRECISIONS
        }
    return answer


def _side_by_side(name: str, sgemm: float, copy: float, tell: Tell) -> dict[str, Any]:
    workload = WORKLOADS[name.lower()]()
    if workload.model in NETWORKS:  # the other loops have their backward pass by hand
        return _networks(name, workload, sgemm, tell)
    ours = _best(name, "ours", 1, tell)
    rivals = {
        loop: min((_best(name, loop, t, tell) for t in THREADS[loop]), key=_cpu) for loop in RIVALS
    }
    alone = _best(name, "tutorial", 1, tell)
    again = _best(
        name, "ours", 1, tell
    )  # before and after the rivals: the machine may have changed under them
    floor, products = floor_of(workload, sgemm, copy), {}
    if floor.flops > LARGE:
        products = {"products": _worked(workload=name, contestant="products")}
    return {
        **_summary([ours, again], workload, sgemm),
        **_ratios(rivals, min(ours, again, key=_cpu)),
        "ratio_tutorial_one_thread": alone["cpu"] / min(ours["cpu"], again["cpu"]),
        "floor": floor._asdict(),
        **products,
    }


def _networks(name: str, workload: Workload, sgemm: float, tell: Tell) -> dict[str, Any]:
    """Ours beside the plain torch loop and torch.func, on one core and on two."""
    table = {
        f"{loop}, {cores} core{'s' * (cores > 1)}": _best(name, loop, cores, tell)
        for loop in ("ours", "tutorial", "vectorised")
        for cores in CORES
    }
    table["ours, 1 core, again"] = _best(name, "ours", 1, tell)
    ran = {title: one for title, one in table.items() if "failed" not in one}
    rivals = {
        loop: min((one for title, one in ran.items() if title.startswith(loop)), key=_cpu)
        for loop in ("tutorial", "vectorised")
        if any(title.startswith(loop) for title in ran)
    }
    own = [one for title, one in ran.items() if title.startswith("ours, 1")]
    return {
        **_summary(own, workload, sgemm),
        **_ratios(rivals, min(own, key=_cpu)),
        "ratio_tutorial_one_thread": ran["tutorial, 1 core"]["cpu"] / min(map(_cpu, own)),
        "prepare_cpu_seconds": max(one["prepare"] for one in own),
        "contestants": {
            title: {key: one[key] for key in ("cpu", "wall", "failed") if key in one}
            for title, one in table.items()
        },
    }


def _summary(own: list[dict[str, Any]], workload: Workload, sgemm: float) -> dict[str, Any]:
    best = min(own, key=_cpu)
    return {
        "cpu_seconds": best["cpu"],
        "wall_seconds": best["wall"],
        "compile_seconds": max(one["compile"] for one in own),
        "compile_seconds_cached": min(one["compile"] for one in own),
        "client_steps_per_second": num_steps(workload) / best["cpu"],
        "sgemm_fraction": gemm_flops(workload) / best["cpu"] / (sgemm * 1e9),
        "residual": best["residual"],
    }


def _ratios(rivals: dict[str, dict[str, Any]], best: dict[str, Any]) -> dict[str, float]:
    """The rivals' CPU time, and over ours."""
    return {f"{loop}_cpu_seconds": one["cpu"] for loop, one in rivals.items()} | {
        f"ratio_{loop}": one["cpu"] / best["cpu"] for loop, one in rivals.items()
    }


def _cpu(result: dict[str, Any]) -> float:
    return float(result["cpu"])


def _best(name: str, contestant: str, threads: int, tell: Tell, **task: Any) -> dict[str, Any]:
    """The best repetition of one contestant, in a process of its own."""
    result = _worked(
        workload=name, contestant=contestant, threads=threads, repeat=REPEAT[contestant], **task
    )
    told = "default threads" if threads == 0 else f"{threads} thread{'s' * (threads > 1)}"
    if "failed" in result:
        tell(f"{name} {contestant} ({told}): {result['failed']}")
        return result
    result |= {"cpu": min(result["cpu"]), "wall": min(result["wall"])}
    tell(f"{name} {contestant} ({told}): {result['cpu']:.3f} s CPU, {result['wall']:.3f} s wall")
    return result


def _worked(**task: Any) -> dict[str, Any]:
    """What a worker process says of a task.

    Our threads are given by PJRT_NPROC for two; one is what a run of these sizes chooses.
    """
    variables = {"PJRT_NPROC": str(task["threads"])} if task.get("threads", 1) > 1 else {}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.worker", json.dumps(task)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
    )
    if done.returncode:
        raise RuntimeError(f"{task} failed: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _swept(kind: str, precision: str, tell: Tell) -> dict[str, float]:
    """CPU time of 10 seeds x 5 step sizes of a quadratic in one sweep, over that of one run."""
    result = _worked(contestant="sweep", precision=precision, **SWEEPS[kind])
    tell(f"sweep of 50 runs, {kind}, {precision}: {result['ratio']:.1f} times one run")
    return {name: float(value) for name, value in result.items()}


def _grown(title: str, tasks: list[dict[str, Any]], tell: Tell) -> list[dict[str, Any]]:
    """Cost for each size, and per client step relative to the first."""
    rows: list[dict[str, Any]] = []
    for task in tasks:
        extra = {key: value for key, value in task.items() if key != "workload"}
        make = WORKLOADS[task["workload"].lower()]
        workload = (make(task["clients"]) if "clients" in task else make())._replace(
            **task.get("replace", {})
        )
        result = _best(task["workload"], "ours", 1, tell, **extra)
        steps = workload.rounds * workload.cohort * workload.local_steps
        row = {
            "clients": len(workload.clients),
            "cohort": workload.cohort,
            "local_steps": workload.local_steps,
        }
        rows.append(
            row
            | {
                "cpu_seconds": result["cpu"],
                "microseconds_per_client_step": 1e6 * result["cpu"] / steps,
            }
        )
    for row in rows:
        row["relative"] = (
            row["microseconds_per_client_step"] / rows[0]["microseconds_per_client_step"]
        )
    return rows


def _contestant(title: str, one: dict[str, Any]) -> str:
    """A line for a contestant.

    >>> _contestant("tutorial, 2 cores", {"cpu": 5.5, "wall": 3.0})
    '    tutorial, 2 cores      CPU   5.500 s  wall   3.000 s'
    """
    said = one.get("failed") or f"CPU {one['cpu']:7.3f} s  wall {one['wall']:7.3f} s"
    return f"    {title:<22} {said}"


def _floor(floor: Floor, row: dict[str, Any]) -> str:
    """A line for the roofline of a work load.

    >>> floor = Floor(flops=800, bytes=2080, products=0.002, moves=0.01)
    >>> _floor(floor, {"cpu_seconds": 0.1, "batched_cpu_seconds": 0.2})
    '    roofline: 800 operations and 2,080 bytes a client step, 0.0020 and 0.0100 s in all; ours
    took 10.0 times the larger, the batched loop 20.0 times'
    """
    times = [row[name] / floor.seconds for name in ("cpu_seconds", "batched_cpu_seconds")]
    return (
        f"    roofline: {floor.flops:,.0f} operations and {floor.bytes:,.0f} bytes a client step, "
        f"{floor.products:.4f} and {floor.moves:.4f} s in all; ours took {times[0]:.1f} times the "
        f"larger, the batched loop {times[1]:.1f} times"
    )


def _products(seconds: dict[str, float]) -> str:
    """A line for the time of a work load's products alone.

    >>> _products({"xla": 5.4, "torch": 5.0})
    '    its products alone, client by client: 5.400 s in XLA, 5.000 s in torch'
    """
    return (
        f"    its products alone, client by client: {seconds['xla']:.3f} s in XLA, "
        f"{seconds['torch']:.3f} s in torch"
    )


def lines(answer: dict[str, Any]) -> list[str]:
    """The answer as lines of text.

    >>> lines({"sgemm_gflops": 50.0, "copy_gigabytes": 40.0})
    ['one thread multiplies matrices at 50 GFLOP/s, and copies 40 GB/s in its cache']
    """
    out = [
        f"one thread multiplies matrices at {answer['sgemm_gflops']:.0f} GFLOP/s, and copies "
        f"{answer['copy_gigabytes']:.0f} GB/s in its cache"
    ]
    for name, row in answer.items():
        if name.startswith("W"):
            out.append(
                f"{name}  CPU {row['cpu_seconds']:.3f} s (wall {row['wall_seconds']:.3f}, compile "
                f"{row['compile_seconds']:.2f}, cached {row['compile_seconds_cached']:.2f})  "
                f"{row['client_steps_per_second']:,.0f} client steps/s  "
                f"{row['sgemm_fraction']:.0%} of sgemm  "
                f"{row['ratio_tutorial']:.1f}x the tutorial's loop "
                f"({row['ratio_tutorial_one_thread']:.1f}x with one "
                "thread)"
                + "".join(
                    f", {row['ratio_' + loop]:.1f}x the {loop} one"
                    for loop in (*RIVALS[1:], "vectorised")
                    if "ratio_" + loop in row
                )
            )
            out += [_contestant(title, one) for title, one in row.get("contestants", {}).items()]
            out += [_floor(Floor(**row["floor"]), row)] if "floor" in row else []
            out += [_products(row["products"])] if "products" in row else []
    for title, rows in answer.get("growth", {}).items():
        out.append(title)
        out += [
            f"  N {row['clients']:>6}  S {row['cohort']:>6}  K {row['local_steps']:>4}  "
            f"{row['cpu_seconds']:.4f} s  "
            f"{row['microseconds_per_client_step']:.3f} us a client step  x{row['relative']:.2f}"
            for row in rows
        ]
    for kind, row in answer.get("sweep", {}).items():
        out.append(
            f"50 runs of a d = 20 quadratic in one sweep, {kind}: {row['ratio']:.1f} times one run"
        )
    return out
