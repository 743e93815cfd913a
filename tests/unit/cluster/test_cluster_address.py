"""The address of a cluster that should run: what is no address, and where nothing listens."""

import socket

import pytest

pytest.importorskip("ray")

from qarl_nemo.cluster import job
from qarl_nemo.cluster.cli import main
from support.clusters import HEAD, one_machine


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config on disk; Ray must not be asked, since it takes minutes to answer."""
    monkeypatch.setattr(job.ray, "init", lambda **_: pytest.fail("Ray was asked"))
    file = tmp_path / "cluster.yaml"
    file.write_text(one_machine(tmp_path, health={"join_timeout_s": 0.1}).as_json())
    return str(file)


@pytest.fixture
def nobody():
    """An address that is taken and where nothing listens."""
    with socket.socket() as taken:
        taken.bind((HEAD, 0))
        yield f"{HEAD}:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", ["check", "run"])
def test_an_address_where_nothing_listens_is_named_in_time(command, config, nobody, capfd):
    assert main([command, config, "--address", nobody]) == 3
    assert f"ERROR: no Ray cluster at {nobody}: nothing answers there (" in capfd.readouterr().err


def test_the_address_may_come_from_rays_variable(config, nobody, capfd, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    assert main(["check", config]) == 3
    assert f"ERROR: no Ray cluster at {nobody}: " in capfd.readouterr().err


@pytest.fixture
def left_by_ray(tmp_path, monkeypatch):
    """The file in which a Ray on this machine names its head; no head runs."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    # Another test's head may run on this machine.
    monkeypatch.setattr(job.services, "find_gcs_addresses", set)
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    return file


@pytest.mark.parametrize("variable", [None, "", "auto"])
def test_an_address_that_a_dead_ray_left_is_named_with_its_file(
    variable, config, nobody, left_by_ray, capfd, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    left_by_ray.write_text(f"{nobody}\n")
    assert main(["check", config]) == 3
    printed = capfd.readouterr().err
    assert f"ERROR: no Ray cluster at {nobody}: nothing answers there (" in printed
    assert f"that address is from {left_by_ray}, which a Ray left" in printed


def test_rays_variable_comes_before_what_a_ray_left(config, nobody, left_by_ray, capfd, monkeypatch):
    left_by_ray.write_text("10.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    assert main(["check", config]) == 3
    printed = capfd.readouterr().err
    assert f"ERROR: no Ray cluster at {nobody}: " in printed
    assert str(left_by_ray) not in printed


def test_a_machine_without_any_ray_has_no_cluster(config, left_by_ray, capfd, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["check", config]) == 3
    assert "ERROR: no Ray cluster at this machine: Could not find any running Ray instance" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("address", ["nonsense", "", "a:", ":6379", "a:b", "a:0", "a:65536", "a b:1", "ray://a:1"])
def test_what_is_no_address_is_refused(command, address, config, capfd):
    assert main([command, config, "--address", address]) == 2
    assert f"ERROR: --address {address}: expected host:port of Ray's head" in capfd.readouterr().err


def test_ray_is_asked_where_something_listens(monkeypatch):
    def refuse(**given):
        raise ConnectionError(f"{given['address']} speaks another language")

    monkeypatch.setattr(job.ray, "init", refuse)
    with socket.create_server((HEAD, 0)) as server:
        address = f"{HEAD}:{server.getsockname()[1]}"
        with pytest.raises(job.ClusterError, match="speaks another language"), job.connected(address, 5.0):
            pass
