import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import qarl_nemo.train  # noqa: F401 hides what CPU vLLM brings broken, before a test imports transformers
from support.formats import FORMATS

if importlib.util.find_spec("triton"):
    from support import triton_interpreter  # noqa: F401 before any test imports a kernel
else:  # there is no Triton but for Linux
    collect_ignore_glob = ["kernels/test_triton_*", "kernels/test_hopper_*"]

# The tests' tensors are small, and test processes share the cores: threads cost more than they give. `make
# test-numerics` asks for several.
NUM_THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
torch.set_num_threads(NUM_THREADS)

# What the tests of these modules share takes long, and each worker would make it for itself.
ONE_WORKER = (
    "test_aligned_model.py",
    "test_campaign.py",
    "test_cluster_ray.py",
    "test_convert_megatron.py",
    "test_ray_engines.py",
    "test_run_faults.py",
    "test_start_together.py",
    "test_step_guard.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    # pytest-xdist 3.8 has marks for this, which do nothing with pytest 9.2.
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            module = nodeid.partition("::")[0]
            return module if module.endswith(ONE_WORKER) else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    without_cuda = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(without_cuda)


@pytest.fixture(autouse=True)
def seed():
    """Give every test the same random numbers and threads, whichever tests ran before it."""
    # torch.manual_seed keeps a traceback for every kind of device that is absent, which takes longer than most tests.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    torch.set_num_threads(NUM_THREADS)


@pytest.fixture(params=FORMATS)
def fmt(request):
    """Every number format, integer ones in both conventions and several group sizes."""
    return FORMATS[request.param]


@pytest.fixture
def poisoned_empty():
    """Fill memory that `torch.empty` and its kin return with NaN, so that reading unwritten elements shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def learner():
    """Make this process the only rank of a learner."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def odd_rewards(monkeypatch):
    """Reward odd last tokens: random models never answer right, and equal rewards teach nothing."""
    from qarl_nemo.train.trainer import Trainer

    monkeypatch.setattr(Trainer, "rewards", lambda _, rollouts, tasks: (rollouts.input_ids[:, -1] % 2).float())


@pytest.fixture
def tools(monkeypatch):
    """Import from a folder of tools/, as the programs there import each other, for one test: tools("on_gpu")."""
    root = Path(__file__).parents[1] / "tools"
    yield lambda folder: monkeypatch.syspath_prepend(root / folder)
    # Another folder has modules of the same names.
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(root)):
            del sys.modules[name]


@pytest.fixture
def qarl(monkeypatch, capfd):
    """Call the command line in this process; returns the exit code and what it printed."""
    from qarl_nemo.cli import main

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["qarl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capfd.readouterr()
        return ended.value.code, printed.out + printed.err

    return call
