"""The public face: names, signatures, versions, and every snippet that we show anybody."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import eggroll_trainer

ROOT = Path(__file__).parent.parent
MODULES = [
    importlib.import_module(f"eggroll_trainer.{module.name}")
    for module in pkgutil.iter_modules(eggroll_trainer.__path__)
]
INTEGRATIONS = ("gymnasium", "mujoco")
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"))
    if "```python" in page.read_text(encoding="utf-8")
)


def test_public_names_are_frozen() -> None:
    """A name that is added or taken away is a decision: write it here and in the CHANGELOG."""
    assert eggroll_trainer.__all__ == [
        "AskTellError",
        "CSVLogger",
        "Callback",
        "Checkpoint",
        "CheckpointError",
        "ClipUp",
        "ConfigurationError",
        "EGGROLLTrainer",
        "ESTrainer",
        "EarlyStopping",
        "EggrollError",
        "EggrollWarning",
        "Evaluate",
        "FitnessError",
        "JSONLogger",
        "Logger",
        "NotBatchableError",
        "ParameterError",
        "Population",
        "PopulationSizeError",
        "ProgressBar",
        "Report",
        "TensorBoardLogger",
        "VanillaESTrainer",
        "WandbLogger",
        "__version__",
        "centered_rank",
        "fitness",
        "policies",
        "population_fitness",
        "standardize",
        "top_directions",
    ]
    for name in eggroll_trainer.__all__:
        assert inspect.getdoc(getattr(eggroll_trainer, name))


def test_signatures_are_frozen() -> None:
    """Positional order and defaults: what users call."""
    common = "params, model, fitness_fn, population_size=256, learning_rate=0.05, sigma=0.1, "
    tail = "group_size=0, device=None, seed=None"
    for trainer, own, end in (
        (eggroll_trainer.ESTrainer, "", ""),
        (eggroll_trainer.VanillaESTrainer, "noise_reuse=2, ", ""),
        (eggroll_trainer.EGGROLLTrainer, "rank=1, noise_reuse=2, ", "freeze_nonlora=False, "),
    ):
        parameters = list(inspect.signature(trainer).parameters.values())
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        shown = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in positional
        )
        assert shown == common + own + tail.replace(", ", f", {end}", 1)


def test_version() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == eggroll_trainer.__version__
    assert f"version: {eggroll_trainer.__version__}" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_typed() -> None:
    assert (ROOT / "eggroll_trainer" / "py.typed").is_file()


def test_the_core_imports_no_extra() -> None:
    code = (
        "import sys, eggroll_trainer\n"
        "extras = {'gymnasium', 'matplotlib', 'mujoco', 'sklearn', 'tensorboard', 'wandb'}\n"
        "extras &= set(sys.modules)\n"
        "sys.exit(str(extras) if extras else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def public_members() -> list[tuple[str, Any]]:
    found = []
    for name in eggroll_trainer.__all__:
        thing = getattr(eggroll_trainer, name)
        for attribute, member in vars(thing).items() if inspect.isclass(thing) else ():
            if not attribute.startswith("_") and (callable(member) or isinstance(member, property)):
                found.append((f"{name}.{attribute}", member))
    return found


def test_everything_public_is_documented() -> None:
    missing = [name for name, member in public_members() if not inspect.getdoc(member)]
    # An override is documented by what it overrides.
    assert not missing


def test_every_argument_is_documented() -> None:
    for name in ("ESTrainer", "EGGROLLTrainer", "VanillaESTrainer"):
        trainer = getattr(eggroll_trainer, name)
        for parameter in inspect.signature(trainer).parameters:
            assert f"\n    {parameter}: " in (inspect.getdoc(trainer) or "") or (
                f"**{parameter}: " in (inspect.getdoc(trainer) or "")
            ), f"{name}: {parameter}"


# --- snippets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_docstring_examples(module: Any) -> None:
    torch.manual_seed(0)
    names = {"torch": torch, **{n: getattr(eggroll_trainer, n) for n in eggroll_trainer.__all__}}
    results = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_docstring_examples_of_integrations(name: str) -> None:
    pytest.importorskip(name)
    from eggroll_trainer.policies import Policy

    module = importlib.import_module(f"eggroll_trainer.integrations.{name}")
    names = {"EGGROLLTrainer": eggroll_trainer.EGGROLLTrainer, "Policy": Policy}
    results = doctest.testmod(module, extraglobs=names)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_of_pages(page: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The python blocks of a page run one after another, in an empty folder, as one program."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: block.start()].count("\n") + 1
        source = "\n" * line + block[1]  # so that a traceback shows the line of the page
        exec(compile(source, str(page), "exec"), names)


@pytest.mark.parametrize("page", sorted(ROOT.glob("**/*.md")), ids=lambda page: page.name)
def test_links_of_pages_lead_somewhere(page: Path) -> None:
    if {".venv", "results"} & set(page.parts):
        return
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not link.startswith(("http", "mailto:")):
            assert (page.parent / link).exists(), link
