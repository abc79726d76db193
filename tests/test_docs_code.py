"""What the documents show as code is code: it compiles, parses, names commands that exist, and scripts run."""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import yaml

from lightning_hybrid.cli.hybrid_cli import HybridCLI
from lightning_hybrid.cli.main import COMMANDS, main
from tests.documents import BLOCKS, DOCS, PAGES, README, ROOT, SCRIPTS, Block, blocks, page_id

QUICKSTART = DOCS / "start" / "quickstart.md"
# In the text and in blocks of these kinds, a line may be a command.
TERMINAL = ("", "bash", "console", "sh", "text")
SECONDS = 240  # for a script
OF_LIGHTNING = ("--config", "--help", "--ckpt_path", "--print_config", "--model", "--data", "--trainer")


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", of_language("python", "py"), ids=str)
def test_python_compiles(block: Block) -> None:
    compile(textwrap.dedent(block.text), str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", of_language("yaml", "yml"), ids=str)
def test_yaml_parses(block: Block) -> None:
    assert yaml.safe_load(block.text) is not None


def commands(page: Path) -> Iterator[list[str]]:
    """The command lines of a page, as words, without what comes before the program."""
    text = page.read_text()
    lines = [line for block in blocks(page) if block.language in TERMINAL for line in unfolded(block.text)]
    lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in lines:
        match = re.match(r"(?:\$ |\w+=\S+ )*((?:lightning-hybrid|make|python -m|pytest)\s.*)", line)
        if match:
            yield shlex.split(match[1], comments=True)


def unfolded(text: str) -> list[str]:
    return re.sub(r"\\\n\s*", " ", text).splitlines()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_exist(page: Path) -> None:
    for program, *words in commands(page):
        line = f"{page_id(page)}: {program} {' '.join(words)}"
        match program:
            case "lightning-hybrid":
                check_own_command(words, line)
            case "make":
                targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert words[0] in [*targets, "TARGET"], line
            case "python":
                assert importlib.util.find_spec(words[1].split("=")[0]) is not None, line
            case "pytest":
                for word in words:
                    assert not word.startswith("tests/") or (ROOT / word.split("::")[0]).exists(), line


def check_own_command(words: list[str], line: str) -> None:
    command, *options = words
    if command.isupper() or command.startswith("-"):  # COMMAND, or an option of the program itself
        return
    assert command in [*COMMANDS, *HybridCLI.subcommands()], line
    for option in options:
        flag = option.split("=")[0]
        if flag.startswith("--") and "." not in flag:
            assert flag in (known_options(command) if command in COMMANDS else OF_LIGHTNING), f"{line}: {flag}"


@cache
def known_options(command: str) -> set[str]:
    text = io.StringIO()
    with redirect_stdout(text), pytest.raises(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text.getvalue()))


# -- scripts that run as they stand ------------------------------------------------------------------------------------


def run(folder: Path, *words: str) -> str:
    """What a program and the ranks that it starts print."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command, both = [sys.executable, *words], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **both) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it has started
            raise
    assert process.returncode == 0, output
    return output


def script_name(block: Block) -> str:
    """As the page calls it: `python NAME.py`."""
    found = re.search(r"python (\w+\.py)", block.page.read_text())
    return found[1] if found else "script.py"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in SCRIPTS if block.page != QUICKSTART], ids=str)
def test_scripts_run_as_they_stand(block: Block, tmp_path: Path) -> None:
    (tmp_path / script_name(block)).write_text(block.text)
    run(tmp_path, script_name(block))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_the_quickstart_prints_what_it_shows_and_so_does_one_process_and_yaml_trains(tmp_path: Path) -> None:
    script, shown, config = (
        next(block for block in blocks(QUICKSTART) if block.language == kind) for kind in ("python", "console", "yaml")
    )
    one = script.text.replace("devices=2", "devices=1").replace(
        "strategy=HybridStrategy(pipeline_parallel_size=2),", ""
    )
    assert script.is_script
    assert "HybridStrategy(" not in one
    (tmp_path / "train.py").write_text(script.text)
    (tmp_path / "one.py").write_text(one)
    (tmp_path / "train.yaml").write_text(config.text)

    call, *expected = shown.text.splitlines()
    assert call == "$ OMP_NUM_THREADS=1 python train.py"
    printed = [line.rstrip() for line in run(tmp_path, "train.py").splitlines()]
    assert [line for line in expected if line not in (*printed, "...")] == []
    assert expected[-1] in run(tmp_path, "one.py")
    assert expected[1] in run(tmp_path, "-m", "lightning_hybrid", "fit", "--config", "train.yaml")


_TINY = """
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
config = LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes)
if int(__import__("os").environ.get("LOCAL_RANK", 0)) == 0:
    LlamaForCausalLM(config).save_pretrained("tiny")
tokens = torch.randint(64, (16, 12))
train_dataloader = DataLoader([{"input_ids": each, "labels": each} for each in tokens], batch_size=8)
"""


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_the_example_of_the_readme_equals_one_process_on_a_small_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (example,) = (block.text for block in blocks(README) if block.language == "python")
    changes = {
        'accelerator="gpu", devices=8, precision="bf16-mixed"': 'accelerator="cpu", devices=4, max_epochs=2',
        '"path/to/model"': '"tiny"',
    }
    for old, new in changes.items():
        assert old in example
        example = example.replace(old, new)
    end = "\ntrainer.print(f\"loss {trainer.callback_metrics['train_loss']:.4f}\")\n"
    one = example.replace("devices=4", "devices=1").replace(", strategy=strategy", "")
    assert one != example
    (tmp_path / "four.py").write_text(_TINY + example + end)
    (tmp_path / "one.py").write_text(_TINY + one + end)
    losses = [re.findall(r"^loss [\d.]+$", run(tmp_path, name), re.MULTILINE) for name in ("one.py", "four.py")]
    assert len(losses[0]) == 1
    assert losses[0] == losses[1]
