"""What a run records of the installed packages."""

from importlib.metadata import version

from tasks.runs import COMPUTING, Run, package_versions


def test_a_run_names_libraries_that_compute_in_other_versions_than_at_its_start(debug, tmp_path):
    run = Run("run", tmp_path)
    installed = package_versions(debug)
    assert installed == {name: version(name) for name in COMPUTING}
    assert {"torch", "transformers", "peft", "numpy", "trl", "accelerate"} <= set(installed)
    assert run.record_versions(installed) == []
    assert run.record_versions(installed) == []
    (warning,) = run.record_versions(installed | {"peft": "0.1"})
    assert f"the run was started with peft {version('peft')}, but peft 0.1 is installed" in warning
    assert run.metadata()["versions"]["peft"] == [version("peft"), "0.1"]
    assert run.record_versions(installed) == []
