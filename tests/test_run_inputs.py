"""A whole job whose input changes under it: it stops, says why, and goes on when that is undone."""

import pytest
from test_run_local import Job

pytestmark = pytest.mark.ray


def test_an_input_that_changes_in_mid_run_stops_the_job(tmp_path):
    job = Job(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    planned = prompts.read_bytes()
    driver = job.start(0.1)
    try:
        job.wait_for_units(1)
        prompts.write_bytes(planned.replace(b"question", b"QUESTION"))
        stopped = job.end(driver)
    finally:
        driver.kill()
    assert stopped.returncode == 2, stopped.stderr
    assert f"error: input {prompts} has changed since the job was planned" in stopped.stderr
    assert f"{len(planned)} bytes, fingerprint" in stopped.stderr
    refused = job.run()
    assert refused.returncode == 2
    assert "input.files" in refused.stderr
    prompts.write_bytes(planned)
    assert job.run().returncode == 0
    job.check()
