"""What the repository promises in its files: jobs load, documents name what exists, clusters parse."""

import json
import logging
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from bastion_batch.config import JobConfig, load_job
from bastion_batch.engine.builtin import BUILT_IN_TARGETS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".txt", ".jsonl", ".json", ""}


def files_of_the_repository() -> list[Path]:
    """Tracked files, and new ones that are not ignored; all but generated ones without git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    names = listed.stdout.splitlines()
    if listed.returncode:
        generated = re.compile(
            r"(^|/)(\.venv|out|build|dist|\.hypothesis|[.\w]*_cache|__pycache__)/"
        )
        paths = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")]
        names = [path for path in paths if not generated.search(path)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


class TestQuickstart:
    def test_job_is_valid_and_names_files_that_exist(self):
        job = load_job(ROOT / "jobs" / "quickstart.yaml").with_absolute_paths(ROOT)
        assert all(Path(path).is_file() for path in job.input.paths)
        assert job.output.path == str(ROOT / "out" / "quickstart")
        assert job.model.target in BUILT_IN_TARGETS

    def test_prompts_are_many_and_varied(self):
        lines = (ROOT / "jobs" / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) >= 64
        assert all(row.keys() == {"id", "kind", "prompt"} for row in rows)
        assert len({row["id"] for row in rows}) == len(rows)
        assert len({row["prompt"].casefold() for row in rows}) == len(rows)
        kinds = Counter(row["kind"] for row in rows)
        assert kinds.keys() >= {"explanation", "maths", "code", "list", "story", "language"}
        lengths = sorted(len(row["prompt"]) for row in rows)
        assert lengths[0] < 40
        assert lengths[-1] > 600


class TestReadme:
    def test_explains_every_field_of_the_job_file(self):
        fields = [
            f"{name}.{field}"
            for name, info in JobConfig.model_fields.items()
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
            for field in info.annotation.model_fields
        ]
        assert [field for field in fields if f"| `{field}` |" not in README] == []
        documented = re.findall(r"^\| `(\w+\.\w+)` \|", README, flags=re.MULTILINE)
        assert Counter(documented) == Counter(fields)

    def test_defaults_are_those_of_the_code(self):
        rows = re.findall(r"^\| `(\w+)\.(\w+)` \| (.*?) \|", README, flags=re.MULTILINE)
        for section, field, shown in rows:
            annotation = JobConfig.model_fields[section].annotation
            assert isinstance(annotation, type)
            assert issubclass(annotation, BaseModel)
            info = annotation.model_fields[field]
            expected = "required" if info.is_required() else f"`{_as_yaml(info.default)}`"
            assert shown == expected, f"{section}.{field}"

    @pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "cluster/README.md"])
    def test_make_targets_exist(self, name):
        text = (ROOT / name).read_text(encoding="utf-8")
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
        assert set(re.findall(r"\bmake ([a-z][\w-]*)`?", _code_of(text))) <= targets

    @pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "cluster/README.md"])
    def test_links_and_paths_exist(self, name):
        file = ROOT / name
        links = re.findall(r"\]\(([^)#]+)\)", file.read_text(encoding="utf-8"))
        assert [x for x in links if "://" not in x and not (file.parent / x).exists()] == []

    def test_commands_of_the_command_line_exist(self):
        from typer.main import get_command

        from bastion_batch.cli import app

        known = set(get_command(app).commands)  # type: ignore[attr-defined]
        named = set(re.findall(r"bastion-batch ([a-z][a-z-]+)", _code_of(README)))
        assert named
        assert named <= known


class TestClusterFiles:
    @pytest.mark.parametrize("name", ["mixed-pool.yaml", "gcp.yaml"])
    def test_are_valid_for_rays_launcher(self, name, caplog):
        from ray.autoscaler._private.util import prepare_config, validate_config

        config = yaml.safe_load((ROOT / "cluster" / name).read_text(encoding="utf-8"))
        with caplog.at_level(logging.CRITICAL):
            prepared = prepare_config(config)
        validate_config(prepared)
        for local in config["file_mounts"].values():
            assert local.startswith("~") or (ROOT / local).exists()
        for commands in (
            prepared["head_start_ray_commands"],
            prepared["worker_start_ray_commands"],
        ):
            assert "RAY_AUTH_MODE=token" in commands[-1]


class TestPackage:
    def test_wheel_holds_drafters_licences_and_types(self, tmp_path):
        scripts = str(Path(sys.executable).parent)
        build = "pip wheel --quiet --no-deps --no-build-isolation --wheel-dir"
        subprocess.run(
            [sys.executable, "-m", *build.split(), tmp_path, ROOT],
            env=os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
            check=True,
        )
        (wheel,) = tmp_path.glob("bastion_batch-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        drafter = "bastion_batch/data/drafters/smollm2-135m-instruct/"
        assert {f"{drafter}config.json", f"{drafter}model.safetensors"} <= set(names)
        assert "bastion_batch/py.typed" in names
        prompts = "bastion_batch/training/prompts/"
        assert {f"{prompts}training.yaml", f"{prompts}held_out.yaml"} <= set(names)
        assert "bastion_batch/data/probe_prompts.txt" in names
        assert {name.rsplit("/licenses/")[-1] for name in names} >= {"LICENSE", "NOTICE"}
        assert not [name for name in names if name.startswith("tests/")]

    def test_constraints_satisfy_the_dependencies(self):
        from packaging.requirements import Requirement

        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        pins = dict(line.split("==") for line in lines if "==" in line)
        needed = [
            *project["project"]["dependencies"],
            *project["dependency-groups"]["test"],
            *project["dependency-groups"]["lint"],
        ]
        for requirement in map(Requirement, needed):
            if requirement.name != "torch":
                pin = pins[requirement.name]
                assert requirement.specifier.contains(pin), f"{requirement} but {pin}"


def test_files_name_no_machine_and_no_registry():
    """Paths and hosts of one machine make no sense on another."""
    forbidden = re.compile(r"/(?:root|work|tmp/w)/|pypi\.org|pythonhosted|download\.pytorch|npmjs")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files_of_the_repository()
        if path.suffix in TEXT_SUFFIXES and path != Path(__file__)
        for match in forbidden.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def _as_yaml(value: object) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip().strip("'")


def _code_of(text: str) -> str:
    """Fenced blocks and inline code."""
    return "\n".join(re.findall(r"```.*?```|`[^`]+`", text, flags=re.DOTALL))


def test_the_package_knows_its_version():
    import bastion_batch

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert bastion_batch.__version__ == project["version"]
