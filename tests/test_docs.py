"""The documentation holds: links and paths lead somewhere, examples run, planned numbers are the planner's."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.config import load_config
from keyhole.methods import METHODS
from scripts import plan_table

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
HISTORY = (ROOT / "LOG.md", ROOT / "CHANGELOG.md", *(ROOT / "benchmarks").rglob("*.md"))
OF_TODAY = [page for page in PAGES if page not in HISTORY]
LINK = re.compile(r"\]\(\s*<?([^)>\"\s]*)[^)]*\)")  # [text](target), also <target> and with a title
OTHER_LINK = re.compile(r"^\[[^\]]+\]:\s*(\S+)|(?:href|src)=\"([^\"]+)\"", re.MULTILINE)  # [name]: target, and HTML
FENCED = re.compile(r"^( *)```.*?^\1``` *$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"(?<![\w/.-])((?:keyhole|tests|benchmarks|scripts|docs)/[\w./*<>-]*[\w>]/?)")
TEST_NAME = re.compile(r"`(test_\w+)(?:\.\.\.)?`")


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The names of a page's headings in links, as GitHub makes them; comments in code are none."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def links_of(text: str) -> list[str]:
    """The targets of all links of a page to files and headings."""
    text = FENCED.sub("", text)
    found = LINK.findall(text) + [a or b for a, b in OTHER_LINK.findall(text)]
    return [link for link in found if not link.startswith(("http:", "https:", "mailto:"))]


def leads_somewhere(link: str, page: Path) -> bool:
    """Whether a link of a page finds a file, folder or heading of the repository, not of this machine."""
    target, _, anchor = link.partition("#")
    file = (page.parent / target).resolve() if target else page
    kept = file.is_relative_to(ROOT) and not target.startswith("/")
    kept = kept and not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
    return kept and file.exists() and (not anchor or (file.is_file() and anchor in anchors(file.read_text())))


def test_the_log_lists_its_sections() -> None:
    """Every section of LOG.md stands in the table at its top, once; its links are tested below."""
    _, table, sections = re.split(
        r"^(## Contents$.*?)(?=^## )", (ROOT / "LOG.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    listed = [link.removeprefix("#") for link in LINK.findall(table)]
    assert sorted(listed) == sorted(anchors(sections))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    """A link to a file or a heading of this repository finds it."""
    assert [link for link in links_of(page.read_text()) if not leads_somewhere(link, page)] == []


@pytest.mark.parametrize(
    "text",
    [
        "[out of it](../../etc/passwd)",
        "[absolute](/etc/hosts)",
        "[hidden](.venv/pyvenv.cfg)",
        '[titled](docs/none.md "x")',
        "[angle](<docs/none.md>)",
        "[ref]\n\n[ref]: docs/none.md",
        '<img src="docs/none.svg">',
        "[a comment](docs/compare.md#adamw-against-lomo-on-two-tasks)",
        "[a folder's heading](docs#x)",
    ],
)
def test_links_that_lead_nowhere_are_found(text: str) -> None:
    """A broken link is seen in every form in which a page may have it."""
    (link,) = links_of(text)
    assert not leads_somewhere(link, ROOT / "README.md")


def paths_of(page: Path) -> Iterator[str]:
    """Paths that a page names, links aside; `<name>` stands for any name."""
    for path in PATH.findall(LINK.sub("]", page.read_text())):
        yield re.sub(r"<\w+>", "*", path)


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.name)
def test_named_paths_exist(page: Path) -> None:
    """Every file and folder that a page names is there."""
    assert [path for path in paths_of(page) if not any(ROOT.glob(path))] == []


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    """Every test that a page promises is defined, under that name or one that begins with it."""
    text = page.read_text()
    if names := TEST_NAME.findall(text):
        sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
        assert [name for name in names if f"def {name}" not in sources] == []


def test_the_tour_has_a_place_for_every_package() -> None:
    """CONTRIBUTING names every package of keyhole in its layers, and every folder of it in its map."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    packages = {path.parent.name for path in (ROOT / "keyhole").glob("*/__init__.py")}
    assert sorted(name for name in packages if f"`{name}`" not in text) == []
    folders = {path.name for path in (ROOT / "keyhole").iterdir() if path.is_dir() and path.name != "__pycache__"}
    _, _, the_map = text.partition("## Map of the folders")
    assert folders - set(re.findall(r"`keyhole/(\w+)/`", the_map)) == set()


@pytest.mark.parametrize("page", ["README.md", "docs/methods.md"])
def test_every_method_is_described(page: str) -> None:
    """A newcomer's two pages name every method there is."""
    text = (ROOT / page).read_text()
    assert [name for name in METHODS if f"`{name}`" not in text] == []


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's loop trains the embedded model as it stands ."""
    example = code_blocks(ROOT / "README.md", "python")[0]
    names = {node.attr for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Attribute)}
    assert {"load", "Workload", "LOMO", "step", "flush", "save_pretrained"} <= names
    monkeypatch.chdir(tmp_path)
    ids = torch.arange(12).view(2, 6)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    example = example.replace("path-or-hub-id", "demo")
    exec(example, {"loader": [batch, [batch, batch]]})
    assert (tmp_path / "out" / "model.safetensors").exists() and (tmp_path / "out" / "config.json").exists()


def test_the_trainer_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's Trainer trains the embedded model as it stands, streamed, in at most ten statements."""
    from keyhole import assets

    _, example = code_blocks(ROOT / "README.md", "python")
    assert len(ast.parse(example).body) <= 10
    monkeypatch.chdir(tmp_path)
    example = example.replace("path-or-hub-id", str(assets.MODEL))
    exec(example, {"texts": ["a b c", "d e f g"]})
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_names_in_prose_are_public() -> None:
    """Methods that the README's example offers beside LOMO exist under these names."""
    example = code_blocks(ROOT / "README.md", "python")[0]
    offered = re.search(r"# or (.*), \.\.\.", example)
    assert offered is not None
    for name in re.findall(r"[A-Z]\w+", offered[1]):
        assert name in keyhole.__all__, name


def test_the_yaml_example_is_a_config(tmp_path: Path) -> None:
    """README's config is read without a fault."""
    (example,) = code_blocks(ROOT / "README.md", "yaml")
    (tmp_path / "config.yaml").write_text(example)
    config, _ = load_config(tmp_path / "config.yaml")
    assert config.method == "zo" and config.gpu_memory == 8 * 2**30


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.name)
def test_commands_with_a_budget_may_stream(page: Path) -> None:
    """Weights are resident by default: a command that gives a new run a budget says where they are."""
    commands = [line for line in page.read_text().splitlines() if line.startswith("    keyhole train model=")]
    assert [line for line in commands if "gpu_memory=" in line and "placement=" not in line] == []


def test_the_8_gb_runs_are_the_recipes() -> None:
    """What README promises for 8 GB is in the table of recipes, which is the planner's."""
    (promise,) = re.findall(r"^- \*\*With 8 GB\.\*\*.*?(?=^- )", (ROOT / "README.md").read_text(), re.M | re.S)
    for name in ("adalomo-llama-3.2-3b-8gb", "zo-14b-8gb"):
        (row,) = re.findall(rf"^\| `{name}` \|(.*)\|$", (ROOT / "docs" / "recipes.md").read_text(), re.M)
        model, method, _, gpu, host, seconds, *_ = [cell.strip() for cell in row.split("|")]
        assert all(part in promise for part in (model.split("/")[1], method, f"{gpu} GiB", f"{seconds} s per step"))
        assert method != "`zo`" or f"{host} GiB of host memory" in promise


def test_the_planned_tables_are_the_planners() -> None:
    """README's row of one model, and its cells in the table of methods, are what scripts/plan_table.py prints today."""
    text, name = (ROOT / "README.md").read_text(), "Llama-3 8B"
    assert plan_table.share_row(name) in text
    column = plan_table.SHOWN.index(name)
    module = plan_table.module_of(name)
    for method in plan_table.COMPARED:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{method}`"))
        assert row.split(" | ")[2 + column] == plan_table.cell(module, method), method


def test_the_core_tests_cover_every_package() -> None:
    """`make check` runs some test of each package of keyhole, and all that it names are there."""
    core = re.search(r"^CORE := (.*?[^\\])\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert core is not None
    paths = core[1].replace("\\\n", " ").split()
    assert [path for path in paths if not (ROOT / path).exists()] == []
    packages = {path.parent.name for path in (ROOT / "keyhole").glob("*/__init__.py")} - {"assets"}
    assert packages - {path.split("/")[1] for path in paths} == set()


def test_the_version_is_one() -> None:
    """The package, pyproject.toml and the newest entry of CHANGELOG.md agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and keyhole.__version__ == project == newest[1]


def test_the_changelog_is_for_users() -> None:
    """A version says what was added, changed, fixed and removed, a line of at most 200 characters per fact."""
    text = (ROOT / "CHANGELOG.md").read_text()
    groups = {"Added", "Changed", "Fixed", "Removed", "Known limits"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= groups
    assert [line for line in text.splitlines() if len(line) > 200] == []


def test_no_text_says_to_install_a_stranger_s_package() -> None:
    """The name of this project with an extra would fetch what others publish under it: texts name what is missing."""
    folders = ("keyhole", "docs", "examples", "scripts", "tests", "benchmarks")
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    texts = [path for path in files if path.suffix in (".md", ".py", ".pyi", ".yaml", ".toml", ".ipynb")]
    wrong = re.compile(r"pip\s+install\s+(?:-\S+\s+)*[\"']?keyhole\b")
    assert [path.name for path in texts if wrong.search(path.read_text())] == []


def test_the_license_is_whole_and_packed() -> None:
    """Its text, from the title to the notice to be filled in; wheel and source archive take it."""
    text, project = (ROOT / "LICENSE").read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = [line.strip() for line in text.splitlines()]
    assert [f"{n}." in text for n in range(1, 10)] == [True] * 9 and "Version 2.0, January 2004" in parts
    assert "END OF TERMS AND CONDITIONS" in parts and parts[-1] == "limitations under the License."
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
