"""Starting the programs of this package: processes of their own, for what no other test should meet."""

import os
import subprocess
import sys
import sysconfig


def environment(**settings: str) -> dict[str, str]:
    """Return an environment in which Python finds what it finds here, and computes with one thread.

    Args:
        settings: more variables, which go before others.
    """
    # Not this interpreter's own folders: Ray's workers may run in another environment.
    own = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    paths = os.pathsep.join(path for path in sys.path if path and not path.startswith(own))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | settings


def run_program(name: str, *arguments: object, ranks: int = 1, timeout_s: float = 300, **settings: str) -> str:
    """Run a module of this package, on several ranks if asked, and return what it printed.

    Args:
        name: the module below `support`, with dots.
        arguments: the program's own.
        ranks: how many processes torchrun starts; 1 does without it.
        timeout_s: limit in seconds.
        settings: environment variables.
    """
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *torchrun, f"support.{name}", *map(str, arguments)],
        env=environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
