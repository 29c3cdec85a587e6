"""The launcher, with real processes. Most scripts are a few lines and import no torch."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from soli.mesh.launch import local
from soli.mesh.launch.blame import stuck
from sweep import swept

SOLI = [sys.executable, "-m", "soli.cli.main"]


class Job:
    """What `soli run` did with a script."""

    def __init__(self, folder: Path, text: str, n: int, *options: str, args: tuple[str, ...] = (), **env: str) -> None:
        self.script = folder / "script.py"
        self.script.write_text(textwrap.dedent(text), encoding="utf-8")
        start = time.time()
        done = subprocess.run(
            [*SOLI, "run", "-n", str(n), "--logs", str(folder / "logs"), *options, str(self.script), *args],
            capture_output=True,
            text=True,
            timeout=60,
            env=clean_environment() | env,
        )
        self.seconds = time.time() - start
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    def line_of(self, text: str) -> str:
        lines = self.script.read_text(encoding="utf-8").splitlines()
        return f"{self.script}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def clean_environment() -> dict[str, str]:
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR", "SOLI_ERROR_FILE", "OMP_NUM_THREADS")
    return {key: value for key, value in os.environ.items() if key not in mine}


def at_once(folder: Path, text: str, cases: dict[str, int]) -> dict[str, Job]:
    """The script's jobs, by its argument and their ranks, beside each other: they mostly sleep."""
    for case in cases:
        (folder / case).mkdir()
    with ThreadPoolExecutor() as pool:
        jobs = {case: pool.submit(Job, folder / case, text, n, "--all-ranks", args=(case,)) for case, n in cases.items()}
    return {case: job.result() for case, job in jobs.items()}


def test_a_rank_knows_its_place(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        """
        import os, sys
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        print(*(os.environ[n] for n in names), int(os.environ["MASTER_PORT"]) > 0, sys.argv[1:], "torch" in sys.modules)
        """,
        2,
        args=("--flag", "x"),
    )
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    row = f"2 {{0}} 2 127.0.0.1 {cores} True ['--flag', 'x'] False\n"
    assert job.code == 0
    assert job.out == "0 " + row.format(0)  # rank 1 is not shown
    assert (tmp_path / "logs" / "rank1.log").read_text() == "1 " + row.format(1)
    assert job.err.count("\n") == 1
    assert str(tmp_path / "logs") in job.err


def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    """Its folder is on the path, its classes pickle, its children find its main module."""
    (tmp_path / "beside.py").write_text("word = 'beside'")
    job = Job(
        tmp_path,
        """
        import multiprocessing, pickle
        import beside
        class Thing: pass
        def child(): return type(pickle.loads(pickle.dumps(Thing()))).__name__
        if __name__ == "__main__":
            assert child() == "Thing"
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(beside.word, pool.apply(child))
        """,
        1,
    )
    assert (job.code, job.out, job.err) == (0, "beside Thing\n", "")


UNSEEDED = """
    import random, sys
    import numpy, torch, soli
    from torch.utils.data import DataLoader

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
        def forward(self, x):
            return self.layers(x)

    names = list({"a", "bb", "ccc", "dddd"})
    rows = torch.tensor(numpy.random.randn(32, 4)) * len(names[0])
    data = [{"x": row, "y": torch.tensor([random.random(), 1.0]).double()} for row in rows]
    engine = soli.parallelize(
        Net().double(), soli.losses.mse("y"), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), plan=sys.argv[1]
    )
    for batch in DataLoader(data, batch_size=8, shuffle=True):
        loss = engine.step(batch)
    print(float(loss))
"""


@pytest.mark.parametrize("plan", ["dp=2", swept("tp=2")])
def test_a_program_that_seeds_nothing_is_one_program_on_all_ranks(tmp_path: Path, plan: str) -> None:
    """Another one in each run, as in one process; the same where SOLI_SEED says so."""
    alone = float(Job(tmp_path, UNSEEDED, 1, args=("dp=1",), SOLI_SEED="7").out)
    job = Job(tmp_path, UNSEEDED, 2, args=(plan,), SOLI_SEED="7")
    assert "different" not in job.out + job.err
    assert float(job.out) == pytest.approx(alone, rel=1e-12)
    assert float(Job(tmp_path, UNSEEDED, 1, args=("dp=1",)).out) != alone


def test_what_a_program_seeds_and_sets_counts(tmp_path: Path) -> None:
    text = """
        import os
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
        print(torch.get_num_threads(), float(torch.rand(())), float(torch.manual_seed(5) and torch.rand(())))
    """
    one, other = (Job(tmp_path, text, 1, SOLI_SEED=seed).out.split() for seed in "34")
    assert one[0] == other[0] == "1"
    assert one[1] != other[1]
    assert one[2] == other[2]


def test_a_seed_that_is_none_is_a_mistake(tmp_path: Path) -> None:
    job = Job(tmp_path, "", 2, SOLI_SEED="many")
    assert job.code == 2
    assert "SOLI_SEED is no seed" in job.err


def test_all_ranks_are_shown_with_their_number(tmp_path: Path) -> None:
    job = Job(tmp_path, "import os, sys; print('out'); print('err', file=sys.stderr)", 2, "--all-ranks")
    assert sorted(job.out.splitlines()) == ["[0] out", "[1] out"]
    assert sorted(job.err.splitlines()) == ["[0] err", "[1] err"]
    assert job.code == 0


@pytest.mark.parametrize("n", [1, 2])
def test_the_exit_code_of_a_rank_is_that_of_the_job(tmp_path: Path, n: int) -> None:
    """Only the last rank fails."""
    text = "import os, sys; last = int(os.environ['RANK']) + 1 == int(os.environ['WORLD_SIZE'])"
    job = Job(tmp_path, f"{text}; sys.exit(7 if last else 0)", n)
    assert job.code == 7
    assert ("rank 1 ended with exit code 7" in job.err) == (n == 2)


def test_a_rank_that_ends_well_before_the_others_is_fine(tmp_path: Path) -> None:
    job = Job(tmp_path, "import os, time; time.sleep(float(os.environ['RANK'])); print('done')", 2)
    assert (job.code, job.out) == (0, "done\n")
    assert (tmp_path / "logs" / "rank1.log").read_text() == "done\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:", "soli: ranks 0-1 failed:\n  File \"{0}\", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n"),
        (
            "import os; from soli.core.errors import failure; "
            "raise failure('not finite on rank ' + os.environ['RANK'], everywhere=True)",
            "soli: stopped, on ranks 0-1, at {0}:1\n- not finite on rank 0\n",
        ),
    ],
)
def test_what_all_ranks_have_is_printed_once_and_no_more(tmp_path: Path, text: str, said: str) -> None:
    """No frame of the launcher; under tp each rank names the one of its own group."""
    job = Job(tmp_path, text, 2)
    assert job.err.split("\n", 1)[1] == said.format(job.script)


def test_where_a_rank_stands_long_after_the_others_ended_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And it goes on as it would, with its own handlers of signals."""
    monkeypatch.setattr(local, "LATE_SECONDS", 0.7)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(4)\n    print('done')\n"
    )
    argv = [sys.executable, "-m", "soli.mesh.launch.rank", str(script)]
    assert local.launch(2, argv, log_dir=tmp_path) == 0
    assert (tmp_path / "rank1.log").read_text() == "done\n"
    said = f"soli: the other ranks ended 0.7 s ago, and it goes on\n  rank 1 still runs; it stood at {script}:4 in <module>\n"
    assert capfd.readouterr().err.split("\n", 1)[1] == said


def test_one_error_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    job = Job(tmp_path, "from soli.core.errors import SoliError\nraise SoliError('wrong', got='this', fix='that')", 3)
    assert job.code == 2
    assert job.err.count("wrong") == 1
    assert f"soli: cannot do this, on ranks 0-2, at {job.script}:2\n- wrong\n" in job.err
    assert "Traceback" not in job.out + job.err


@pytest.mark.parametrize("n", [1, 3])
def test_one_exception_of_all_ranks_is_printed_once(tmp_path: Path, n: int) -> None:
    """With the traceback that plain Python prints: no frame of the launcher."""
    job = Job(tmp_path, "def f(): return {}['wrong']\nf()\n", n)
    assert job.code == 1
    assert job.err.count("Traceback") == 1
    assert job.err.count("KeyError: 'wrong'") == 1
    assert ("soli: ranks 0-2 failed:" in job.err) == (n == 3)
    assert re.findall(r'File "(.*)", line (\d)', job.err) == [(str(job.script), "2"), (str(job.script), "1")]
    if n > 1:
        assert "KeyError: 'wrong'" in (tmp_path / "logs" / "rank1.log").read_text()


def test_the_first_cause_and_not_what_followed_from_it(tmp_path: Path) -> None:
    """Rank 0's error comes first on the clock, and says that another rank is the cause."""
    job = Job(
        tmp_path,
        """
        import os, time
        from soli.core.errors import failure
        if os.environ["RANK"] == "0":
            lost = failure("all_reduce of w: a rank is gone")
            lost.consequence = True
            raise lost
        time.sleep(0.5)
        raise ValueError("the cause")
        """,
        2,
    )
    assert job.code == 1
    assert "soli: rank 1 failed:\nTraceback" in job.err
    other = f"  rank 0 then stopped: all_reduce of w: a rank is gone (at {job.line_of('raise lost')})"
    assert job.err.rstrip().endswith(f"ValueError: the cause\n{other}")


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """Also where another rank notices within a millisecond and says so first."""
    job = Job(
        tmp_path,
        """
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            print("allocating", flush=True)
            time.sleep(0.3)
            with open(sys.argv[1] + ".new", "w") as file:
                file.write(f"/proc/{os.getpid()}/stat")
            os.rename(sys.argv[1] + ".new", sys.argv[1])
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.exists(sys.argv[1]):
            pass

        def gone(stat):  # a loaded machine may let it stand between its file and its end
            try:
                return open(stat).read().rsplit(")", 1)[1].split()[0] == "Z"
            except OSError:
                return True

        while not gone(open(sys.argv[1]).read()):
            pass
        raise RuntimeError("an answer is missing")  # nothing that names another rank
        """,
        2,
        args=(str(tmp_path / "gone"),),
    )
    assert job.code == 1
    assert "soli: rank 1 was killed by SIGKILL (out of memory?)" in job.err
    assert "  | allocating" in job.err
    assert "rank 0 also failed: RuntimeError: an answer is missing" in job.err
    assert "Traceback" not in job.err


def test_a_hanging_rank_is_ended_and_its_line_named(tmp_path: Path) -> None:
    """Rank 0 hangs and ignores SIGTERM; a thread of it is no better answer than its main thread."""
    job = Job(
        tmp_path,
        """
        import os, signal, threading, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def wait_for_ever():
            threading.Event().wait()  # here
        if os.environ["RANK"] == "0":
            threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
            wait_for_ever()
        time.sleep(0.5)  # until rank 0 hangs
        raise ValueError("the cause")
        """,
        2,
    )
    assert job.code == 1
    assert job.seconds < 10  # 3 to end by itself, 0.5 for its stacks, 2 on SIGTERM; without SIGKILL 5 more
    assert "ValueError: the cause" in job.err
    assert f"rank 0 was still running and was ended; it stood at {job.line_of('# here')} in wait_for_ever" in job.err


def test_a_rank_that_failed_is_the_cause_while_a_thread_of_it_lives(tmp_path: Path) -> None:
    """A prefetcher is no daemon: Python waits for it after the error. The error of a child that the other caught is not its own."""
    text = """
        import os, sys, threading, time
        if os.environ["RANK"] == "1":
            threading.Thread(target=time.sleep, args=(60,)).start()
            time.sleep(0.3)
            raise ValueError("the cause")
        if os.fork() == 0:
            raise KeyError("of a child")
        os.wait()
        time.sleep(60 * (sys.argv[1] == "waits"))
    """
    for other, job in at_once(tmp_path, text, {"waits": 2, "ends": 2}).items():
        assert job.code == 1
        assert job.seconds < 20  # 10 for what it may have to do at its end
        assert "soli: rank 1 failed:\nTraceback" in job.err
        assert "ValueError: the cause" in job.err
        assert "KeyError" not in job.err
        assert ("rank 0 was still running and was ended; it stood at" in job.err) == (other == "waits")


def test_what_ranks_do_at_their_end_is_waited_for(tmp_path: Path) -> None:
    """A checkpoint that an error on all ranks waits for, and a program's atexit, longer than others have; an error that is shown and no end."""
    text = """
        import atexit, code, os, sys, time
        from soli.core.errors import failure
        from soli.core.report import FINISH
        def slow():
            time.sleep(4.5)
            print("did", sys.argv[1])
        if sys.argv[1] == "console":
            code.InteractiveConsole().push("nme + 1")
            slow()
        elif sys.argv[1] == "all":
            FINISH.append(slow)
            raise failure("on all", everywhere=True)
        elif os.environ["RANK"] == "0":
            atexit.register(slow)
            raise ValueError
        else:
            time.sleep(60)
    """
    ended = at_once(tmp_path, text, {"console": 1, "all": 2, "alone": 2})
    assert {what: (job.code, job.out.count(f"did {what}")) for what, job in ended.items()} == {
        "console": (0, 1),
        "all": (1, 2),
        "alone": (1, 1),
    }


def test_a_childs_wait_is_not_its_ranks(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        """
        import json, os, time
        told = {"pid": os.getpid() + 1, "call": "all_reduce", "moved": 0.0, "looked": time.time()}
        for _ in range(12):
            open(os.environ["SOLI_WAITS_FILE"], "w").write(json.dumps(told | {"looked": time.time()}))
            time.sleep(0.5)
        """,
        1,
    )
    assert job.code == 0, job.err


def test_what_the_ranks_of_a_failed_job_started_ends_with_it(tmp_path: Path) -> None:
    """Also what one has put into a session of its own, or left behind itself; not what runs beside the job."""
    other = subprocess.Popen(["sleep", "60"], env=clean_environment() | {"SOLI_JOB": "another"})
    job = Job(
        tmp_path,
        """
        import os, subprocess, sys, time
        for apart in (False, True):
            child = subprocess.Popen(["sleep", "60"], start_new_session=apart)
            open(f"{sys.argv[1]}/child{child.pid}", "w").close()
        time.sleep(0.5)
        sys.exit(int(os.environ["RANK"]))
        """,
        2,
        args=(str(tmp_path),),
    )
    children = [int(mark.name.removeprefix("child")) for mark in tmp_path.glob("child*")]
    assert (job.code, len(children)) == (1, 4)
    wait_until(lambda: not any(map(alive, children)))
    assert alive(other.pid)
    other.kill()
    other.wait()


def test_ranks_end_with_the_launcher(tmp_path: Path) -> None:
    script, marks = tmp_path / "script.py", tmp_path / "marks"
    marks.mkdir()
    script.write_text(f"import os, time; open({str(marks)!r} + '/' + str(os.getpid()), 'w').close(); time.sleep(60)")
    job = subprocess.Popen([*SOLI, "run", "-n", "2", str(script)], env=clean_environment(), stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(marks.iterdir())) == 2)
    ranks = [int(mark.name) for mark in marks.iterdir()]
    assert [rank for rank in ranks if alive(rank)] == ranks
    job.kill()
    job.wait()
    wait_until(lambda: not any(alive(rank) for rank in ranks))
    assert [rank for rank in ranks if alive(rank)] == []


SAVES = """
import os, signal, sys, time, torch, soli

def save(*_):
    time.sleep(1.5)
    open(f"saved{os.environ['RANK']}", "w").close()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
open(f"begun{os.environ['RANK']}", "w").close()
try:
    time.sleep(60)
except KeyboardInterrupt:
    save()
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ranks_that_are_told_to_end_may_save_first(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """A terminal's Ctrl-C goes to all of them; a scheduler's SIGTERM to the launcher alone."""
    (tmp_path / "script.py").write_text(SAVES)
    job = subprocess.Popen(
        [*SOLI, "run", "-n", "2", "script.py"],
        cwd=tmp_path,
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: all((tmp_path / f"begun{rank}").exists() for rank in range(2)))
    if sent == signal.SIGINT:
        os.killpg(job.pid, sent)
    else:
        for _ in range(2):  # a scheduler's second one is no other word
            job.send_signal(sent)
            time.sleep(0.3)
    _, err = job.communicate(timeout=30)
    assert (job.returncode, "ranks may take 30 s to end" in err) == (code, True), err
    assert [(tmp_path / f"saved{rank}").exists() for rank in range(2)] == [True, True]


FAILS = """
import torch, soli

model = torch.nn.Linear(3000, 3000)
engine = soli.parallelize(
    model, soli.losses.mse("targets"), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), plan="dp=2,zero=1"
)
batch = {"input": torch.randn(2, 3000), "targets": torch.randn(2, 3000)}
engine.step(batch)
engine.save("kept", wait=False)
engine.step({**batch, "input": batch["input"] * float("nan")})
"""


def test_an_error_on_all_ranks_lets_a_checkpoint_be_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, FAILS.replace('"kept"', repr(str(tmp_path / "kept"))), 2)
    assert job.code == 1
    assert "is not finite" in job.err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("kept")] == ["kept"]


def test_an_interrupt_ends_all_with_130(tmp_path: Path) -> None:
    script, marks = tmp_path / "script.py", tmp_path / "marks"
    marks.mkdir()
    script.write_text(f"import os, time; open({str(marks)!r} + '/' + str(os.getpid()), 'w').close(); time.sleep(60)")
    job = subprocess.Popen(
        [*SOLI, "run", "-n", "2", str(script)],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    wait_until(lambda: len(list(marks.iterdir())) == 2)
    os.killpg(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=20)
    assert job.returncode == 130
    assert "soli: interrupted" in err
    assert "Traceback" not in err
    assert not any(alive(int(mark.name)) for mark in marks.iterdir())


def wait_until(true: object, seconds: float = 90) -> None:
    until = time.time() + seconds
    while not true():  # type: ignore[operator]
        assert time.time() < until, "it did not happen in time"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        job = Job(tmp_path, "print('started')", 2, MASTER_PORT=port)
    assert job.code == 2
    assert f"port {port} on 127.0.0.1" in job.err
    assert "started" not in job.out
    free = Job(tmp_path, "import os; print(os.environ['MASTER_PORT'])", 2, MASTER_PORT=port)
    assert (free.code, free.out) == (0, port + "\n")


def piped(folder: Path, text: str, *options: str, n: int = 2, given: str = "", **env: str) -> subprocess.Popen[bytes]:
    (folder / "piped.py").write_text(textwrap.dedent(text), encoding="utf-8")
    (folder / "given").write_text(given)
    command = [*SOLI, "run", "-n", str(n), "--logs", str(folder / "logs"), *options, str(folder / "piped.py")]
    with (folder / "given").open() as stdin:
        return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment() | env)


def test_what_is_given_to_the_program_goes_to_the_first_rank_whole(tmp_path: Path) -> None:
    """Not torn among all, each of which would have a part of the numbers."""
    numbers = "".join(f"{number}\n" for number in range(20_000))
    job = piped(tmp_path, "import os, sys, time; rank = int(os.environ['RANK']); time.sleep(1 - rank); print(rank, sum(map(int, sys.stdin)))", "--all-ranks", given=numbers)
    out, _ = job.communicate(timeout=60)
    assert sorted(out.decode().splitlines()) == [f"[0] 0 {sum(range(20_000))}", "[1] 1 0"]


def test_a_reader_that_goes_ends_the_job(tmp_path: Path) -> None:
    """`| head -1`: the ranks are told by their pipes, as one process would be."""
    job = piped(tmp_path, "for i in range(200_000): print('line', i)", "--all-ranks")
    assert job.stdout is not None
    assert b"line" in job.stdout.readline()
    job.stdout.close()
    assert job.wait(timeout=40) == 1
    assert job.stderr is not None
    assert b"Exception in thread" not in job.stderr.read()


def test_a_reader_that_is_slow_gets_all_lines(tmp_path: Path) -> None:
    """As a pager, which reads on when its user does."""
    job = piped(tmp_path, "for i in range(1000): print('x' * 50, i)", "--all-ranks", n=4)
    time.sleep(8)  # all ranks are long done
    out, _ = job.communicate(timeout=60)
    assert len(out.splitlines()) == 4000


def test_output_that_the_terminal_cannot_show_is_shown_as_it_can(tmp_path: Path) -> None:
    job = piped(tmp_path, "import os; os.write(1, 'caf\u00e9\\n'.encode())", "--all-ranks", PYTHONIOENCODING="ascii")
    out, err = job.communicate(timeout=60)
    assert (job.returncode, sorted(out.splitlines())) == (0, [rb"[0] caf\xc3\xa9", rb"[1] caf\xc3\xa9"]), err


def test_a_file_name_that_is_no_text_is_in_the_report(tmp_path: Path) -> None:
    """As os.listdir gives it, in an error of a rank that is logged."""
    job = Job(tmp_path, "import os\nif os.environ['RANK'] == '1': raise ValueError('cannot read caf\\udce9.txt')", 2)
    assert job.code == 1
    assert r"cannot read caf\udce9.txt" in job.err
    assert "rank 1" in job.err


@pytest.mark.parametrize(("text", "kept"), [("if rank == '0': print(rank)", False), ("print(rank)", True), ("sys.exit(int(rank))", True)])
def test_logs_of_nobody_are_not_left(tmp_path: Path, text: str, kept: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\nrank = os.environ['RANK']\n{text}\n")
    told = clean_environment() | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([*SOLI, "run", "-n", "2", str(script)], env=told, capture_output=True, text=True, timeout=60, check=False)
    (folder,) = re.findall(r"others in (\S+): rank1.log", done.stderr)
    assert Path(folder).parent == tmp_path
    assert Path(folder).exists() == kept


def test_a_missing_script_is_a_mistake(tmp_path: Path) -> None:
    done = subprocess.run([*SOLI, "run", "-n", "2", str(tmp_path / "none.py")], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"there is no such script\n    got     {tmp_path / 'none.py'}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"SOLI_DEADLINE": "abc"}, "the deadline is no number of seconds above 0\n    got     abc"),
        ({"SOLI_DEADLINE": "-1"}, "the deadline is no number of seconds above 0\n    got     -1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "some of a rank's variables but not MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}, "MASTER_PORT is no number of a port\n    got     99999"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK is none of WORLD_SIZE ranks\n    got     RANK=2"),
    ],
)
def test_settings_of_a_rank_that_are_none_are_a_mistake(tmp_path: Path, setting: dict[str, str], said: str) -> None:
    text = "from soli.mesh.world import join; join()"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=clean_environment() | setting)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_logs_that_cannot_be_written_are_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    for inside in ("", "/deeper"):
        job = Job(tmp_path, "", 2, "--logs", f"{tmp_path}/logs{inside}")
        assert job.code == 2
        assert "what the ranks write has no folder" in job.err
        assert f"'{tmp_path}/logs{inside}'" in job.err


@pytest.mark.parametrize("launched", [True, False])
def test_errors_are_seen_after_torch_made_its_group(tmp_path: Path, launched: bool) -> None:
    """torch's own hook swallows what is printed to sys.stderr; without the launcher rank 0 prints it itself."""
    text = """
        import sys
        from soli.core.errors import SoliError
        from soli.mesh.world import join
        world = join()
        if world.rank == 0:
            import io
            sys.stderr = io.StringIO()  # what torch's hook does where it is the outer one
        raise SoliError("wrong", everywhere=True)
        """
    if launched:
        job = Job(tmp_path, text, 2)
        assert (job.code, job.err.count("wrong")) == (2, 1)
        assert "on ranks 0-1" in job.err
        return
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=clean_environment() | place | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert [error.count("- wrong") for error in errors] == [1, 0]


def test_a_rank_killed_in_a_real_collective_is_the_cause(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        """
        import os, signal, torch
        import torch.distributed as dist
        from soli.mesh.world import join
        world = join()
        dist.all_reduce(torch.ones(1))
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        """,
        2,
    )
    assert job.code == 1
    assert "soli: rank 1 was killed by SIGKILL" in job.err
    assert "rank 0 then stopped: " in job.err


def test_what_gloo_gives_back_as_a_rank_ends_is_waited_for(tmp_path: Path) -> None:
    """A thread of gloo's has the last tensor, and what hangs on that is at work when the program ends."""
    job = Job(
        tmp_path,
        """
        import threading
        import time

        import torch
        import torch.distributed as dist

        from soli.mesh.world import join

        class Slow:
            def __del__(self):
                if threading.current_thread() is not threading.main_thread():
                    while not ended or time.monotonic() < ended[0] + 0.7:
                        pass

        ended = []
        world = join()
        group = dist.group.WORLD  # which is not freed before Python ends
        ones = torch.ones(4)
        ones.slow = Slow()
        dist.barrier()
        time.sleep(world.rank * 0.5)
        dist.all_reduce(ones, async_op=True)
        del ones
        dist.barrier()
        ended.append(time.monotonic())
        """,
        2,
        "--backend",
        "gloo",
    )
    assert job.code == 0, job.err


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_rank_that_ends_well_while_others_wait_is_the_cause(tmp_path: Path, when: str) -> None:
    """Before the ranks meet, and between two collectives: long before the deadline."""
    job = Job(
        tmp_path,
        f"""
        import os, sys, torch
        import torch.distributed as dist
        from soli.mesh.world import join

        def leave():
            if os.environ["RANK"] == "1":
                print("no data for me")
                sys.exit()

        if {when == "before"}:
            leave()
        join()
        dist.all_reduce(torch.ones(1))
        leave()
        dist.all_reduce(torch.ones(1))  # here
        """,
        2,
    )
    assert job.code == 1
    assert job.seconds < 40
    said = "soli: rank 1 ended with exit code 0 while others waited\n  the last output of rank 1:\n  | no data for me\n  fix  "
    assert said in job.err
    other = "still running in the meeting of all 2 ranks and was ended; it stood" if when == "before" else "rank 1 of group 0 is gone"
    assert other in job.err
    assert when == "before" or f"(at {job.line_of('# here')})" in job.err


def test_ranks_that_wait_in_calls_that_cannot_meet_are_named(tmp_path: Path) -> None:
    """No rank is behind in its own group; before that one is late, which is nobody's fault."""
    job = Job(
        tmp_path,
        """
        import time, torch
        import torch.distributed as dist
        from soli.mesh.world import join
        rank = join().rank
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        time.sleep(4.5 * rank)
        dist.all_reduce(torch.ones(1))
        print("met")
        dist.all_reduce(torch.ones(1), group=groups[rank])  # here
        """,
        2,
    )
    assert (job.code, job.out) == (1, "met\n")
    assert job.seconds < 40
    assert "no rank can go on: each waits for others, in a call that they do not make\n    fix" in job.err
    for rank in range(2):
        stood = f"rank {rank} was still running in #0 all_reduce(sum) of float32[1] at {job.line_of('# here')}, group {rank + 1} (ranks 0-1) and"
        assert stood in job.err


def test_ranks_that_wait_may_have_somebody_to_wait_for() -> None:
    """One that computes; one that has moved since; one that has not looked since; one that is still to meet the others."""
    wait = lambda moved, looked: {"call": "", "moved": moved, "looked": looked}
    now = time.time()
    crossed = [wait(100.0, 104.0), wait(99.0, 103.5)]
    assert stuck(iter(crossed), 0.0)
    for other in (None, wait(101.0, 104.0), wait(90.0, 102.9), wait(90.0, None)):
        assert not stuck(iter([*crossed, other]), 0.0)
    assert not stuck(iter(crossed), 101.0)
    for ended, found in ((now - 10, True), (now - 5, False), (0.0, False)):
        assert stuck(iter([wait(now - 60, None)]), ended) is found


def test_a_loaders_worker_that_is_killed_is_named_and_no_collective(tmp_path: Path) -> None:
    """Its end is raised wherever the rank is: here where it waits for the other."""
    job = Job(
        tmp_path,
        """
        import os, signal, time, torch, soli
        late = float(os.environ["RANK"] == "0")

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, i):
                if i == 2 and not late:
                    time.sleep(0.7)
                    os.kill(os.getpid(), signal.SIGKILL)
                return torch.ones(2), torch.zeros(2)

        make = lambda p: torch.optim.SGD(p, lr=0.1)
        engine = soli.parallelize(torch.nn.Linear(2, 2), soli.losses.mse(), optimizer=make, plan="dp=2")
        for batch in torch.utils.data.DataLoader(Data(), 2, num_workers=1, prefetch_factor=1):
            time.sleep(3 * late)
            engine.step(batch)
        """,
        2,
    )
    assert job.code == 1
    assert "soli: rank 1 failed:\nTraceback" in job.err
    assert "RuntimeError: DataLoader worker (pid" in job.err
    assert "the backend refused it" not in job.err


def test_a_rank_that_does_not_arrive_at_a_step_is_shown_where_it_stands(tmp_path: Path) -> None:
    """Rank 0 misses rank 1 in soli's own collective; the report has both, and ends within seconds."""
    job = Job(
        tmp_path,
        """
        import time, torch, soli
        make = lambda p: torch.optim.SGD(p, lr=0.1)
        engine = soli.parallelize(torch.nn.Linear(2, 2), soli.losses.mse(), optimizer=make, plan="auto")
        if torch.distributed.get_rank() == 1:
            time.sleep(300)  # here
        engine.step((torch.ones(4, 2), torch.zeros(4, 2)))
        """,
        2,
        SOLI_DEADLINE="4",
    )
    assert job.code == 1
    assert job.seconds < 150  # ended, and not waited for
    assert "soli: stopped, on rank 0, at " in job.err
    assert f"rank 1 was still running and was ended; it stood at {job.line_of('# here')} in <module>" in job.err


def test_an_error_of_the_programs_own_is_told_beside_one_that_its_finally_makes(tmp_path: Path) -> None:
    job = Job(tmp_path, """
        import soli
        try:
            open("/there/is/no/such/file")
        finally:
            soli.Plan.parse("dp=none")
    """, 1)
    assert job.code == 2
    assert "it came while an error of the program's own was on its way" in job.err
    assert "FileNotFoundError" in job.err
    assert f"{job.line_of('open(')}" in job.err
