"""Make the peers' environments: `python benchmarks/envs.py [NAME ...]`.

One small venv a peer under benchmarks/.envs/. Each sees the torch of the interpreter that runs this script
through a .pth file, so pip counts torch as installed and pulls no second (CUDA) copy of it, and every system
is measured on the very same torch; and it sees this repository's soli, for the local backend. Running it again does
nothing where nothing changed.

A peer that cannot be installed is no error here: its reason is kept in .envs/NAME/state.json and the
benchmark prints that reason in the peer's row.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVS = HERE / ".envs"


@dataclass(frozen=True)
class Spec:
    """What one environment holds: pip's arguments, install after install, and the proof that it works."""

    installs: tuple[tuple[str, ...], ...]
    check: str  # python source run in the finished environment, under its variables
    packages: tuple[str, ...]  # whose versions are recorded
    variables: tuple[tuple[str, str], ...] = ()  # set for every run in this environment; {env} is its folder


# Colossal-AI 0.5.0 pins torch<=2.5.1 and a dozen exact versions, so it goes in without its dependencies, and
# beside it by hand what importing it needs.
COLOSSAL_NEEDS = """
    rich click fabric contexttimer rpyc==6.0.0 plumbum galore_torch peft==0.13.2 transformers==4.51.3
    huggingface_hub<1 tokenizers>=0.21,<0.22 accelerate regex requests diffusers==0.29.0 markdown-it-py
    mdurl pygments google protobuf hf-xet urllib3 idna certifi charset-normalizer pydantic pydantic-core
    annotated-types typing-inspection typing-extensions invoke paramiko decorator deprecated wrapt
    sentencepiece importlib_metadata zipp pillow bitsandbytes einops safetensors ninja psutil pyyaml
    packaging tqdm numpy filelock fsspec six bcrypt cryptography pynacl cffi pycparser beautifulsoup4
    soupsieve
"""

PEERS = {
    "lightweight": Spec(
        installs=(("accelerate==1.15.0", "lightning-fabric==2.6.6"),),
        check="import accelerate, lightning_fabric",
        packages=("accelerate", "lightning-fabric"),
    ),
    "deepspeed": Spec(
        installs=(("setuptools", "wheel", "ninja"), ("--no-build-isolation", "deepspeed==0.19.8")),
        # builds its shared-memory operator now (a minute of g++), not inside the first measured run
        check="from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load()",
        packages=("deepspeed",),
        variables=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0"), ("TORCH_EXTENSIONS_DIR", "{env}/extensions")),
    ),
    "colossalai": Spec(
        installs=(
            ("setuptools<81", "wheel"),  # its setup.py wants both, and it imports pkg_resources
            ("--no-deps", *COLOSSAL_NEEDS.split()),
            ("--no-deps", "--no-build-isolation", "colossalai==0.5.0"),
        ),
        check="import colossalai, colossalai.booster",
        packages=("colossalai", "transformers"),
    ),
    "megatron": Spec(
        installs=(("megatron-core==0.16.1",),),
        check="from megatron.core.tensor_parallel import ColumnParallelLinear",
        packages=("megatron-core",),
        variables=(("CUDA_DEVICE_MAX_CONNECTIONS", "1"),),  # it warns without
    ),
}

# Of calculon and SimuMax the index has nothing (its "calculon" is another project): what they import, for clones.
PLANNERS = {
    "calculon": Spec(installs=(("psutil==7.1.3",),), check="import psutil", packages=("psutil",)),
    "llm-analysis": Spec(
        installs=(("--no-deps", "llm-analysis==0.2.2"), ("fire==0.7.1",)),
        check="import llm_analysis.analysis",
        packages=("llm-analysis",),
    ),
    "simumax": Spec(
        installs=(("numpy", "pandas", "sympy", "matplotlib", "tabulate", "graphviz", "tqdm"),),
        check="import pandas, sympy",
        packages=("numpy", "pandas", "sympy"),
    ),
    "galvatron": Spec(
        installs=(
            ("setuptools<81", "wheel", "pybind11"),
            ("--no-deps", "--no-build-isolation", "hetu-galvatron==2.4.0"),
            ("scipy", "rich"),
        ),
        check="import galvatron_dp_core, scipy",
        packages=("hetu-galvatron", "scipy"),
    ),
}
SPECS = PEERS | PLANNERS


def python_of(name: str) -> Path:
    """The interpreter of one environment; `base` is the one that runs this script."""
    return Path(sys.executable) if name == "base" else ENVS / name / "bin" / "python"


def variables_of(name: str) -> dict[str, str]:
    """The variables that every process in this environment gets (a tool of its bin/ must be found: ninja)."""
    if name == "base":
        return {}
    folder = ENVS / name
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"PATH": path, **{k: v.format(env=folder) for k, v in SPECS[name].variables}}


def state_of(name: str) -> dict:
    """{"ok", "reason", "versions"} of one environment, as the last run of this script left it."""
    if name == "base":
        return {"ok": True, "reason": "", "versions": {}}
    file = ENVS / name / "state.json"
    if not file.exists():
        return {"ok": False, "reason": "no environment; run python benchmarks/envs.py", "versions": {}}
    return json.loads(file.read_text())


def base_site() -> Path:
    """The folder that the running interpreter's torch is in (found, not imported: this must stay quick)."""
    from importlib.util import find_spec

    found = find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("envs: this interpreter has no torch; run with the python that soli is installed in")
    return Path(found.origin).parents[1]


def run(arguments: list[str], variables: dict[str, str], seconds: int) -> str:
    """'' if the command worked, else the last line that it printed."""
    print("  $", " ".join(a if "\n" not in a else "..." for a in arguments)[:160], flush=True)
    try:
        environment = {**os.environ, **variables}
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"took more than {seconds} s: {' '.join(arguments[:4])}"
    if done.returncode == 0:
        return ""
    lines = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower()]  # pip ends on a hint, not on the error
    return (named or lines)[-1].strip() if lines else f"exit status {done.returncode}"


def make(name: str) -> dict:
    """Make or complete one environment and return its state, which is also written down."""
    spec, folder, site = SPECS[name], ENVS / name, base_site()
    wanted = json.loads(json.dumps({"spec": asdict(spec), "base": str(site), "python": sys.version}))
    before = state_of(name)
    if before["ok"] and before.get("wanted") == wanted:
        print(f"{name}: there already, {before['versions']}")
        return before
    print(f"{name}: making {folder.relative_to(HERE.parent)}", flush=True)
    if not python_of(name).exists():
        venv.create(folder, with_pip=True)
    library = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (library / "base.pth").write_text(f"{site}\n{HERE.parent / 'src'}\n")  # soli, for its backend
    reason = ""
    for packages in spec.installs:
        reason = reason or run(
            [str(python_of(name)), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages],
            variables_of(name),
            900,
        )
    reason = reason or run([str(python_of(name)), "-c", spec.check], variables_of(name), 600)
    state = {"ok": not reason, "reason": reason, "versions": versions(name, spec.packages), "wanted": wanted}
    (folder / "state.json").write_text(json.dumps(state, indent=1) + "\n")
    print(f"{name}: NOT usable: {reason}" if reason else f"{name}: ready, {state['versions']}", flush=True)
    return state


def versions(name: str, packages: tuple[str, ...]) -> dict[str, str]:
    """The versions that are really there, and torch's, to show that it is the base's."""
    source = (
        "import json, sys; from importlib.metadata import version, PackageNotFoundError\n"
        "out = {}\n"
        "for p in sys.argv[1:]:\n"
        "    try: out[p] = version(p)\n"
        "    except PackageNotFoundError: out[p] = 'missing'\n"
        "print(json.dumps(out))"
    )
    done = subprocess.run(
        [str(python_of(name)), "-c", source, *packages, "torch"], capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip()[-200:]}


def main() -> None:
    """Make what was named, or all the peers'."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SPECS)} (default: {', '.join(PEERS)})")
    names = parser.parse_args().names or list(PEERS)
    unknown = sorted(set(names) - set(SPECS))
    if unknown:
        parser.error(f"no environment named {', '.join(unknown)}; there are {', '.join(SPECS)}")
    ENVS.mkdir(exist_ok=True)
    states = {name: make(name) for name in names}
    print(f"{sum(s['ok'] for s in states.values())} of {len(states)} environments usable")


if __name__ == "__main__":
    main()
